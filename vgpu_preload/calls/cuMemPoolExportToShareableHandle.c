#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemPoolExportToShareableHandle,
     (void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemPoolExportToShareableHandle, handle_out, pool, handleType, flags);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_POOL_SHARED, held_export_key((uintptr_t)pool), 0, NULL);
    return rc;
}
