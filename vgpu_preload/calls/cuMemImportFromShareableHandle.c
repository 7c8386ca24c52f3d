#include "../gate.h"
#include "../intercept.h"
#include "../objects.h"

/* A process that maps imported memory can be checkpointed by the driver and not be restored (measured: 801, then 401).
 */
WRAP(CUresult, cuMemImportFromShareableHandle,
     (CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemImportFromShareableHandle, handle, osHandle, shHandleType);
    if (rc != CUDA_SUCCESS || !entered_gate) return rc;
    objects_lock();
    struct memory_object *object = object_new(OBJECT_IMPORT, 0);
    if (object != NULL) {
        object->handle = *handle;
        object->asked_handle_types = shHandleType;
        object->handle_references = 1;
        *handle = token_of(object);
    }
    objects_unlock();
    return rc;
}
