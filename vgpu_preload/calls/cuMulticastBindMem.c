#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuMulticastBindMem,
     (CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset,
      size_t size, unsigned long long flags))
{
    PASS_GATE();
    CUmemGenericAllocationHandle handle = handle_of_token(memHandle), multicast = handle_of_token(mcHandle);
    CUresult rc = NEXT(cuMulticastBindMem, multicast, mcOffset, handle, memOffset, size, flags);
    if (rc == CUDA_SUCCESS && entered_gate) app_memory_set_obstacle(memHandle, "bound to a multicast object");
    return rc;
}
