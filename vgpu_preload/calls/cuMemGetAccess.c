#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr))
{
    PASS_GATE();
    if (entered_gate && app_memory_is_allocation(ptr, 1)) return CUDA_ERROR_INVALID_VALUE;
    return NEXT(cuMemGetAccess, flags, location, ptr);
}
