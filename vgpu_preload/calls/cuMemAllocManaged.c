#include "../driver.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

/* The driver refuses to checkpoint a process that has managed memory (measured: 801). */
WRAP(CUresult, cuMemAllocManaged, (CUdeviceptr *dptr, size_t bytesize, unsigned int flags))
{
    CUcontext context = NULL;
    PASS_GATE();
    CUresult rc = NEXT(cuMemAllocManaged, dptr, bytesize, flags);
    if (rc != CUDA_SUCCESS || !entered_gate) return rc;
    driver.cuCtxGetCurrent(&context);
    held_add(BLOCKER_MANAGED, *dptr, bytesize, context);
    return rc;
}
