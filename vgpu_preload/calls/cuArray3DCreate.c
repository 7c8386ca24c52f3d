#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuArray3DCreate_v2, (CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray))
{
    PASS_GATE();
    CUresult rc = NEXT(cuArray3DCreate_v2, pHandle, pAllocateArray);
    if (rc == CUDA_SUCCESS && entered_gate) held_add_array((uintptr_t)*pHandle, pAllocateArray);
    return rc;
}
