#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMipmappedArrayCreate,
     (CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, unsigned int numMipmapLevels))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMipmappedArrayCreate, pHandle, pMipmappedArrayDesc, numMipmapLevels);
    if (rc == CUDA_SUCCESS && entered_gate) held_add_array((uintptr_t)*pHandle, pMipmappedArrayDesc);
    return rc;
}
