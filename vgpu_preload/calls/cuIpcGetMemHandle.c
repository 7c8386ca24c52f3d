#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../offers.h"

/* The driver offers only its own allocations; what we have backed we offer. */
WRAP(CUresult, cuIpcGetMemHandle, (CUipcMemHandle *pHandle, CUdeviceptr dptr))
{
    CUresult rc = CUDA_SUCCESS;
    PASS_GATE();
    if (entered_gate && offer_by_handle(dptr, pHandle, &rc)) return rc;
    rc = NEXT(cuIpcGetMemHandle, pHandle, dptr);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_IPC_EXPORTED, held_export_key(dptr), 0, NULL);
    return rc;
}
