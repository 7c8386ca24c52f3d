#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuMemMap,
     (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemMap, ptr, size, offset, handle_of_token(handle), flags);
    if (rc == CUDA_SUCCESS && entered_gate) app_memory_mapped(ptr, size, offset, handle);
    return rc;
}
