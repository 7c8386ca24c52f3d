#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuMemSetAccess, (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count))
{
    PASS_GATE();
    if (entered_gate && app_memory_is_allocation(ptr, size)) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = NEXT(cuMemSetAccess, ptr, size, desc, count);
    if (rc == CUDA_SUCCESS && entered_gate) app_memory_access_set(ptr, size, desc, count);
    return rc;
}
