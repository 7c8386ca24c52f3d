#include "../app_memory.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"
#include "../offers.h"

/* The application's descriptors of one object are all of one open file. So memory that came back from the agent, which
 * is an import for the driver and cannot be exported (measured: 1), is given by the descriptor that came with it. */
WRAP(CUresult, cuMemExportToShareableHandle,
     (void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType,
      unsigned long long flags))
{
    CUmemGenericAllocationHandle real;
    int asked;
    PASS_GATE();
    if (!entered_gate) return NEXT(cuMemExportToShareableHandle, shareableHandle, handle, handleType, flags);
    if (!app_memory_properties(handle, &real, &asked)) {
        CUresult rc = NEXT(cuMemExportToShareableHandle, shareableHandle, handle, handleType, flags);
        bool is_fabric = handleType == CU_MEM_HANDLE_TYPE_FABRIC;
        if (rc == CUDA_SUCCESS) held_given_away(handle, is_fabric ? BLOCKER_FABRIC : BLOCKER_EXPORT);
        return rc;
    }
    if ((asked & handleType) == 0) return CUDA_ERROR_INVALID_VALUE;
    bool is_descriptor = handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && shareableHandle != NULL && flags == 0;
    if (is_descriptor && offer_by_descriptor_again(handle, shareableHandle)) return CUDA_SUCCESS;
    CUresult rc = NEXT(cuMemExportToShareableHandle, shareableHandle, real, handleType, flags);
    if (rc == CUDA_SUCCESS) offer_made(handle, is_descriptor ? *(int *)shareableHandle : -1);
    return rc;
}
