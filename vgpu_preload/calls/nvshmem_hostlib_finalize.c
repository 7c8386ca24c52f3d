#include "../intercept.h"
#include "../nvshmem_facts.h"

WRAP(void, nvshmemid_hostlib_finalize, (void *device_ctx, void *transport_device_ctx))
{
    NVSHMEM_PASSAGE();
    NEXT(nvshmemid_hostlib_finalize, device_ctx, transport_device_ctx);
    if (is_outermost) nvshmem_finalised(function_behind(CALL_nvshmemid_hostlib_finalize));
}

WRAP(void, nvshmemx_hostlib_finalize, (void))
{
    NVSHMEM_PASSAGE();
    NEXT_WITH(nvshmemx_hostlib_finalize, ());
    if (is_outermost) nvshmem_finalised(function_behind(CALL_nvshmemx_hostlib_finalize));
}
