#include "../allocation.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../objects.h"

/* Memory that is still mapped lives on; then the handle stays with us until the last mapping goes. */
static bool release_token(CUmemGenericAllocationHandle token, CUmemGenericAllocationHandle *handle)
{
    objects_lock();
    struct memory_object *object = object_of_token(token);
    bool is_valid = object != NULL && object->handle_references > 0;
    *handle = 0;
    if (is_valid && --object->handle_references == 0 && object->first_mapping == NULL)
        *handle = object_end_locked(object);
    objects_unlock();
    return is_valid;
}

WRAP(CUresult, cuMemRelease, (CUmemGenericAllocationHandle handle))
{
    CUmemGenericAllocationHandle real = 0;
    PASS_GATE();
    if (entered_gate && release_token(handle, &real)) return real != 0 ? NEXT(cuMemRelease, real) : CUDA_SUCCESS;
    CUresult rc = NEXT(cuMemRelease, handle);
    if (rc == CUDA_SUCCESS && entered_gate) held_remove(handle);
    return rc;
}
