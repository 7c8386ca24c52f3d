#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMipmappedArrayDestroy, (CUmipmappedArray hMipmappedArray))
{
    PASS_GATE();
    struct held_entry entry = entered_gate ? held_take((uintptr_t)hMipmappedArray) : (struct held_entry){0};
    CUresult rc = NEXT(cuMipmappedArrayDestroy, hMipmappedArray);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}
