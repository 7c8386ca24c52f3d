#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemPoolImportFromShareableHandle,
     (CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemPoolImportFromShareableHandle, pool_out, handle, handleType, flags);
    if (rc == CUDA_SUCCESS && entered_gate)
        held_add(BLOCKER_POOL_SHARED, held_export_key((uintptr_t)*pool_out), 0, NULL);
    return rc;
}
