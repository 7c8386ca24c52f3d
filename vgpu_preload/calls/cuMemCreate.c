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
static bool enter_into_table(enum object_kind kind, CUmemGenericAllocationHandle *handle, size_t size,
                             const CUmemAllocationProp *prop)
{
    objects_lock();
    struct memory_object *object = object_new(kind, size);
    if (object != NULL) {
        object->requested = size;
        object->device = kind == OBJECT_VMM ? prop->location.id : -1;
        object->handle = *handle;
        object->asked_handle_types = prop->requestedHandleTypes;
        object->handle_references = 1;
        *handle = token_of(object);
    }
    objects_unlock();
    return object != NULL;
}

/* The driver checkpoints a process with memory of the host made here, and does not restore it (measured: 999, then
 * 401). So it is followed like device memory, as long as a handle or a mapping of it is there. */
static void note_what_stays(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop)
{
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        held_add(HELD_VMM, *handle, size, NULL);
    else if (!enter_into_table(OBJECT_HOST, handle, size, prop))
        held_add(BLOCKER_HOST_VMM, *handle, size, NULL);
}

WRAP(CUresult, cuMemCreate,
     (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags))
{
    PASS_GATE();
    if (entered_gate && handle != NULL && can_be_moved(prop, size)) {
        CUmemAllocationProp shareable = *prop;
        shareable.requestedHandleTypes |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        CUresult rc = NEXT(cuMemCreate, handle, size, &shareable, flags);
        if (rc == CUDA_SUCCESS && enter_into_table(OBJECT_VMM, handle, size, prop)) return rc;
        if (rc == CUDA_SUCCESS) {
            held_add(HELD_VMM, *handle, size, NULL);
            return rc;
        }
    }
    CUresult rc = NEXT(cuMemCreate, handle, size, prop, flags);
    if (rc == CUDA_SUCCESS && entered_gate) note_what_stays(handle, size, prop);
    return rc;
}
