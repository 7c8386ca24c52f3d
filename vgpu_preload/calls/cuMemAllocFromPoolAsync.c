#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemAllocFromPoolAsync, (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemAllocFromPoolAsync, dptr, bytesize, pool, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(HELD_POOL, *dptr, bytesize, NULL);
    return rc;
}

WRAP(CUresult, cuMemAllocFromPoolAsync_ptsz,
     (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemAllocFromPoolAsync_ptsz, dptr, bytesize, pool, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(HELD_POOL, *dptr, bytesize, NULL);
    return rc;
}
