#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../objects.h"

static bool can_be_moved(const CUmemAllocationProp *prop, size_t size)
{
    return prop != NULL && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id >= 0 &&
           prop->location.id < MOST_DEVICES && size % STAGED_LEAST_BYTES == 0;
}

/* The application gets a token: the driver's handle changes when the memory has been away. */
static bool enter_into_table(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop)
{
    objects_lock();
    struct memory_object *object = object_new(OBJECT_VMM, size);
    if (object != NULL) {
        object->requested = size;
        object->device = prop->location.id;
        object->handle = *handle;
        object->asked_handle_types = prop->requestedHandleTypes;
        object->handle_references = 1;
        *handle = token_of(object);
    }
    objects_unlock();
    return object != NULL;
}

WRAP(CUresult, cuMemCreate,
     (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags))
{
    PASS_GATE();
    if (entered_gate && handle != NULL && can_be_moved(prop, size)) {
        CUmemAllocationProp shareable = *prop;
        shareable.requestedHandleTypes |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        CUresult rc = NEXT(cuMemCreate, handle, size, &shareable, flags);
        if (rc == CUDA_SUCCESS && enter_into_table(handle, size, prop)) return rc;
        if (rc == CUDA_SUCCESS) {
            held_add(HELD_VMM, *handle, size, NULL);
            return rc;
        }
    }
    CUresult rc = NEXT(cuMemCreate, handle, size, prop, flags);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(HELD_VMM, *handle, size, NULL);
    return rc;
}
