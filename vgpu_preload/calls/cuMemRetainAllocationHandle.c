#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *handle, void *addr))
{
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)addr;
    PASS_GATE();
    if (entered_gate && app_memory_is_allocation(address, 1)) return CUDA_ERROR_INVALID_VALUE;
    if (entered_gate && handle != NULL && app_memory_retain(address, handle)) return CUDA_SUCCESS;
    return NEXT(cuMemRetainAllocationHandle, handle, addr);
}
