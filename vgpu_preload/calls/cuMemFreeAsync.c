#include "../allocation.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

/* Memory from cuMemAlloc may be given here too. Ours is freed at once, after a wait for the work before it. */
WRAP(CUresult, cuMemFreeAsync, (CUdeviceptr dptr, CUstream hStream))
{
    CUresult rc = CUDA_SUCCESS;
    PASS_GATE();
    if (entered_gate && allocation_free(dptr, &rc)) return rc;
    struct held_entry entry = entered_gate ? held_take(dptr) : (struct held_entry){0};
    rc = NEXT(cuMemFreeAsync, dptr, hStream);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}

WRAP(CUresult, cuMemFreeAsync_ptsz, (CUdeviceptr dptr, CUstream hStream))
{
    CUresult rc = CUDA_SUCCESS;
    PASS_GATE();
    if (entered_gate && allocation_free(dptr, &rc)) return rc;
    struct held_entry entry = entered_gate ? held_take(dptr) : (struct held_entry){0};
    rc = NEXT(cuMemFreeAsync_ptsz, dptr, hStream);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}
