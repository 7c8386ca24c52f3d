#include "../app_memory.h"
#include "../descriptors.h"
#include "../gate.h"
#include "../intercept.h"
#include "../objects.h"

/* Memory that came back from the agent is an import for the driver, and imports cannot be exported (measured: 1); then
 * the descriptor that came with it is the export. */
WRAP(CUresult, cuMemExportToShareableHandle,
     (void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType,
      unsigned long long flags))
{
    struct app_export object;
    PASS_GATE();
    if (!entered_gate || !app_memory_export(handle, &object))
        return NEXT(cuMemExportToShareableHandle, shareableHandle, handle, handleType, flags);
    if ((object.asked_handle_types & handleType) == 0) return CUDA_ERROR_INVALID_VALUE;
    if (object.kept_fd >= 0 && handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && shareableHandle != NULL)
        return descriptor_copy(object.kept_fd, (int *)shareableHandle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    CUresult rc = NEXT(cuMemExportToShareableHandle, shareableHandle, object.handle, handleType, flags);
    if (rc == CUDA_SUCCESS) app_memory_exported(handle);
    return rc;
}
