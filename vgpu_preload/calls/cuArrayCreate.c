#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuArrayCreate_v2, (CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray))
{
    PASS_GATE();
    CUresult rc = NEXT(cuArrayCreate_v2, pHandle, pAllocateArray);
    if (rc != CUDA_SUCCESS || !entered_gate) return rc;
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = pAllocateArray->Width,
                                     .Height = pAllocateArray->Height,
                                     .Format = pAllocateArray->Format,
                                     .NumChannels = pAllocateArray->NumChannels};
    held_add_array((uintptr_t)*pHandle, &shape);
    return rc;
}
