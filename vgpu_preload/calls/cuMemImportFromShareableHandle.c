#include "../driver.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../loose_descriptors.h"
#include "../objects.h"

static bool enter_import(CUmemGenericAllocationHandle *handle, int descriptor, const CUmemAllocationProp *found)
{
    objects_lock();
    struct memory_object *object = object_new(OBJECT_IMPORT, 0);
    if (object != NULL) {
        object->handle = *handle;
        object->device = found->location.id;
        object->asked_handle_types = found->requestedHandleTypes;
        object->handle_references = 1;
        if (descriptor >= 0 && objects_imports() <= MOST_IMPORT_DESCRIPTORS) loose_keep_copy(descriptor, &object->shared);
        *handle = token_of(object);
    }
    objects_unlock();
    return object != NULL;
}

/* A process that maps imported memory can be checkpointed by the driver and not be restored (measured: 801, then 401).
 */
WRAP(CUresult, cuMemImportFromShareableHandle,
     (CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemImportFromShareableHandle, handle, osHandle, shHandleType);
    if (rc != CUDA_SUCCESS || !entered_gate) return rc;
    CUmemAllocationProp found = {.location = {.id = -1}};
    driver.cuMemGetAllocationPropertiesFromHandle(&found, *handle);
    found.requestedHandleTypes = shHandleType;
    int descriptor = shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? (int)(intptr_t)osHandle : -1;
    if (!enter_import(handle, descriptor, &found)) held_add(BLOCKER_IMPORT, *handle, 0, NULL);
    return rc;
}
