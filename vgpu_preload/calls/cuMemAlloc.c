#include "../allocation.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemAlloc_v2, (CUdeviceptr *dptr, size_t bytesize))
{
    PASS_GATE();
    if (entered_gate && allocation_make(dptr, bytesize)) return CUDA_SUCCESS;
    CUresult rc = NEXT(cuMemAlloc_v2, dptr, bytesize);
    if (rc == CUDA_SUCCESS && entered_gate) held_add_allocation(*dptr, bytesize);
    return rc;
}
