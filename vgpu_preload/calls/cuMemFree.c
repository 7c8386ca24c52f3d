#include "../allocation.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemFree_v2, (CUdeviceptr dptr))
{
    CUresult rc = CUDA_SUCCESS;
    PASS_GATE();
    if (entered_gate && allocation_free(dptr, &rc)) return rc;
    /* Forgotten first: once the driver has it back, another thread may get the same address. */
    struct held_entry entry = entered_gate ? held_take(dptr) : (struct held_entry){0};
    rc = NEXT(cuMemFree_v2, dptr);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}
