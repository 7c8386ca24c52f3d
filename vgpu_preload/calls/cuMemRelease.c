#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../object_end.h"

/* Memory that is still mapped lives on; then the handle stays with us until the last mapping goes. */
static bool release_token(CUmemGenericAllocationHandle token, struct object_remains *remains)
{
    objects_lock();
    struct memory_object *object = object_of_token(token);
    bool is_valid = object != NULL && object->handle_references > 0;
    *remains = no_remains;
    if (is_valid && --object->handle_references == 0 && object->first_mapping == NULL)
        *remains = object_end_locked(object);
    objects_unlock();
    return is_valid;
}

WRAP(CUresult, cuMemRelease, (CUmemGenericAllocationHandle handle))
{
    struct object_remains remains;
    PASS_GATE();
    if (entered_gate && release_token(handle, &remains)) {
        remains_close(&remains);
        return remains.handle != 0 ? NEXT(cuMemRelease, remains.handle) : CUDA_SUCCESS;
    }
    CUresult rc = NEXT(cuMemRelease, handle);
    if (rc == CUDA_SUCCESS && entered_gate) held_remove(handle);
    return rc;
}
