#include "../gate.h"
#include "../intercept.h"
#include "../objects.h"

/* The one attribute that can be set belongs to the memory, and has to be set again when the memory comes back. */
WRAP(CUresult, cuPointerSetAttribute, (const void *value, CUpointer_attribute attribute, CUdeviceptr ptr))
{
    PASS_GATE();
    CUresult rc = NEXT(cuPointerSetAttribute, value, attribute, ptr);
    if (rc != CUDA_SUCCESS || !entered_gate || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return rc;
    objects_lock();
    struct memory_mapping *mapping = mapping_around(ptr);
    if (mapping != NULL) mapping->syncs_copies = *(const int *)value != 0;
    objects_unlock();
    return rc;
}
