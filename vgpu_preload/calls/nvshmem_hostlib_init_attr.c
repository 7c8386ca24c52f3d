#include "../intercept.h"
#include "../nvshmem_facts.h"

/* The first is what NVSHMEM's device library calls, the second what a program without one calls. */

WRAP(int, nvshmemid_hostlib_init_attr,
     (int requested, int *provided, unsigned int bootstrap_flags, nvshmemx_init_attr_t *attr,
      nvshmemi_version_t nvshmem_device_lib_version, nvshmemx_device_lib_init_cb cb))
{
    NVSHMEM_PASSAGE();
    int rc = NEXT(nvshmemid_hostlib_init_attr, requested, provided, bootstrap_flags, attr, nvshmem_device_lib_version, cb);
    if (rc == 0 && is_outermost) nvshmem_initialised(function_behind(CALL_nvshmemid_hostlib_init_attr));
    return rc;
}

WRAP(int, nvshmemx_hostlib_init_attr, (unsigned int flags, nvshmemx_init_attr_t *attr))
{
    NVSHMEM_PASSAGE();
    int rc = NEXT(nvshmemx_hostlib_init_attr, flags, attr);
    if (rc == 0 && is_outermost) nvshmem_initialised(function_behind(CALL_nvshmemx_hostlib_init_attr));
    return rc;
}
