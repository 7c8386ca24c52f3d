#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

/* The way of sharing that was added for us is not shown. */
WRAP(CUresult, cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle))
{
    struct app_export object;
    PASS_GATE();
    if (!entered_gate || !app_memory_export(handle, &object))
        return NEXT(cuMemGetAllocationPropertiesFromHandle, prop, handle);
    CUresult rc = NEXT(cuMemGetAllocationPropertiesFromHandle, prop, object.handle);
    if (rc == CUDA_SUCCESS) prop->requestedHandleTypes = object.asked_handle_types;
    return rc;
}
