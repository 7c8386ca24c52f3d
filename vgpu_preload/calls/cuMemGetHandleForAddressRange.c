#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemGetHandleForAddressRange,
     (void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType, unsigned long long flags))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemGetHandleForAddressRange, handle, dptr, size, handleType, flags);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_DMABUF, held_export_key(dptr), size, NULL);
    return rc;
}
