#include "../driver.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../loose_descriptors.h"
#include "../objects.h"

static bool is_on_host(const CUmemAllocationProp *found)
{
    int type = found->location.type;
    return type >= CU_MEM_LOCATION_TYPE_HOST && type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static bool enter_import(CUmemGenericAllocationHandle *handle, int descriptor, const CUmemAllocationProp *found)
{
    bool is_host = is_on_host(found);
    objects_lock();
    struct memory_object *object = object_new(is_host ? OBJECT_HOST : OBJECT_IMPORT, 0);
    if (object != NULL) {
        object->handle = *handle;
        object->device = is_host ? -1 : found->location.id;
        object->asked_handle_types = found->requestedHandleTypes;
        object->handle_references = 1;
        bool is_kept = !is_host && descriptor >= 0 && objects_imports() <= MOST_IMPORT_DESCRIPTORS;
        if (is_kept) loose_keep_copy(descriptor, &object->shared);
        *handle = token_of(object);
    }
    objects_unlock();
    return object != NULL;
}

static enum held_kind kind_of(const CUmemAllocationProp *found)
{
    if (is_on_host(found)) return BLOCKER_HOST_VMM;
    return found->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC ? BLOCKER_FABRIC : BLOCKER_IMPORT;
}

/* A process that maps imported memory, of a device or of the host, can be checkpointed by the driver and not be
 * restored (measured: 801, then 401). */
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
    if (!enter_import(handle, descriptor, &found)) held_add(kind_of(&found), *handle, 0, NULL);
    return rc;
}
