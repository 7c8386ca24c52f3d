#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

/* Told and no hindrance: the driver's checkpoint and restore keep what two processes share of an event (measured), in a
 * file of /dev/shm that the dump of the container takes along. */
WRAP(CUresult, cuIpcGetEventHandle, (CUipcEventHandle *pHandle, CUevent event))
{
    PASS_GATE();
    CUresult rc = NEXT(cuIpcGetEventHandle, pHandle, event);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_EVENT, (uintptr_t)event, 0, NULL);
    return rc;
}
