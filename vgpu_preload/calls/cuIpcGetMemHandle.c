#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

/* The driver offers only its own allocations; on memory that we have backed it fails with its own code. */
WRAP(CUresult, cuIpcGetMemHandle, (CUipcMemHandle *pHandle, CUdeviceptr dptr))
{
    PASS_GATE();
    CUresult rc = NEXT(cuIpcGetMemHandle, pHandle, dptr);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_EXPORTED, held_export_key(dptr), 0, NULL);
    return rc;
}
