#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuIpcOpenEventHandle, (CUevent *phEvent, CUipcEventHandle handle))
{
    PASS_GATE();
    CUresult rc = NEXT(cuIpcOpenEventHandle, phEvent, handle);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_EVENT, (uintptr_t)*phEvent, 0, NULL);
    return rc;
}
