#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../openings.h"

/* Handles of the driver's own memory go to the driver. */
static bool is_handle_of_ours(const CUipcMemHandle *bytes, struct share_handle *handle)
{
    return atomic_load_explicit(&gate_is_there, memory_order_relaxed) && share_handle_read(handle, bytes);
}

WRAP(CUresult, cuIpcOpenMemHandle, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags))
{
    struct share_handle ours;
    if (is_handle_of_ours(&handle, &ours)) return opening_make(pdptr, &ours, Flags);
    PASS_GATE();
    CUresult rc = NEXT(cuIpcOpenMemHandle, pdptr, handle, Flags);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_OPENED, *pdptr, 0, NULL);
    return rc;
}

WRAP(CUresult, cuIpcOpenMemHandle_v2, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags))
{
    struct share_handle ours;
    if (is_handle_of_ours(&handle, &ours)) return opening_make(pdptr, &ours, Flags);
    PASS_GATE();
    CUresult rc = NEXT(cuIpcOpenMemHandle_v2, pdptr, handle, Flags);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_OPENED, *pdptr, 0, NULL);
    return rc;
}
