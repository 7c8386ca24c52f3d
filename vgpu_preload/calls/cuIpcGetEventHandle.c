#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

/* Events are the driver's alone: what two processes share of them nobody brings back, so they are named. */
WRAP(CUresult, cuIpcGetEventHandle, (CUipcEventHandle *pHandle, CUevent event))
{
    PASS_GATE();
    CUresult rc = NEXT(cuIpcGetEventHandle, pHandle, event);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_EVENT, (uintptr_t)event, 0, NULL);
    return rc;
}
