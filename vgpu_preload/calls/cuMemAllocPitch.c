#include "../allocation.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemAllocPitch_v2,
     (CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes))
{
    PASS_GATE();
    if (entered_gate && allocation_make_pitched(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes))
        return CUDA_SUCCESS;
    CUresult rc = NEXT(cuMemAllocPitch_v2, dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    if (rc == CUDA_SUCCESS && entered_gate) held_add_allocation(*dptr, *pPitch * Height);
    return rc;
}
