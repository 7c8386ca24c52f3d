#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemAllocAsync, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemAllocAsync, dptr, bytesize, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(HELD_POOL, *dptr, bytesize, NULL);
    return rc;
}

WRAP(CUresult, cuMemAllocAsync_ptsz, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemAllocAsync_ptsz, dptr, bytesize, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(HELD_POOL, *dptr, bytesize, NULL);
    return rc;
}
