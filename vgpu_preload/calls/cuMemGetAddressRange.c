#include "../gate.h"
#include "../intercept.h"
#include "../objects.h"

/* What the application asked for, not what it was rounded up to. Who asks for neither is left to the driver, which then
 * does not look (measured: 0 for freed memory). */
WRAP(CUresult, cuMemGetAddressRange_v2, (CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr))
{
    PASS_GATE();
    if (!entered_gate || (pbase == NULL && psize == NULL)) return NEXT(cuMemGetAddressRange_v2, pbase, psize, dptr);
    objects_lock();
    struct memory_mapping *mapping = mapping_around(dptr);
    bool is_allocation = mapping != NULL && mapping->object->kind == OBJECT_ALLOC;
    struct memory_object *object = allocation_around(dptr);
    CUdeviceptr base = object != NULL ? object->first_mapping->address : 0;
    size_t size = object != NULL ? object->requested : 0;
    objects_unlock();
    if (object == NULL && is_allocation) return CUDA_ERROR_NOT_FOUND; /* what it was rounded up by */
    if (object == NULL) return NEXT(cuMemGetAddressRange_v2, pbase, psize, dptr);
    if (pbase != NULL) *pbase = base;
    if (psize != NULL) *psize = size;
    return CUDA_SUCCESS;
}
