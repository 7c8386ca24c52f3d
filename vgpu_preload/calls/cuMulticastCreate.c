#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMulticastCreate, (CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMulticastCreate, mcHandle, prop);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_MULTICAST, *mcHandle, prop->size, NULL);
    return rc;
}
