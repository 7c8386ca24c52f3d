#include "../app_memory.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

/* Our own cuMemAlloc memory cannot be unmapped by address, as it cannot with the plain driver. */
WRAP(CUresult, cuMemUnmap, (CUdeviceptr ptr, size_t size))
{
    PASS_GATE();
    if (!entered_gate) return NEXT(cuMemUnmap, ptr, size);
    if (app_memory_is_allocation(ptr, size)) return CUDA_ERROR_INVALID_VALUE;
    struct memory_mapping *hidden = app_memory_hide(ptr, size);
    CUresult rc = NEXT(cuMemUnmap, ptr, size);
    if (rc != CUDA_SUCCESS) {
        app_memory_show(hidden);
        return rc;
    }
    app_memory_unmapped(hidden);
    if (held_has_had(BLOCKER_HOST_VMM)) held_remove(ptr);
    return rc;
}
