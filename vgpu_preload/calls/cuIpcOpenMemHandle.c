#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuIpcOpenMemHandle, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags))
{
    PASS_GATE();
    CUresult rc = NEXT(cuIpcOpenMemHandle, pdptr, handle, Flags);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_OPENED, *pdptr, 0, NULL);
    return rc;
}

WRAP(CUresult, cuIpcOpenMemHandle_v2, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags))
{
    PASS_GATE();
    CUresult rc = NEXT(cuIpcOpenMemHandle_v2, pdptr, handle, Flags);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_OPENED, *pdptr, 0, NULL);
    return rc;
}
