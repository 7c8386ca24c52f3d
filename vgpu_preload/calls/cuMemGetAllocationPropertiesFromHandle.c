#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

/* The way of sharing that was added for us is not shown. */
WRAP(CUresult, cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle))
{
    CUmemGenericAllocationHandle real;
    int asked;
    PASS_GATE();
    if (!entered_gate || !app_memory_properties(handle, &real, &asked))
        return NEXT(cuMemGetAllocationPropertiesFromHandle, prop, handle);
    CUresult rc = NEXT(cuMemGetAllocationPropertiesFromHandle, prop, real);
    if (rc == CUDA_SUCCESS) prop->requestedHandleTypes = asked;
    return rc;
}
