/* Physical memory by POSIX descriptor: given to other processes, and taken from them.
 *
 * Only the creator may export: exporting an imported handle is an invalid argument, as measured on the real driver. Whose memory a
 * descriptor is, its memfd's name says.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"

API(cuMemExportToShareableHandle, (void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags), (out, handle, type, flags))
{
    NEED(out && flags == 0 && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&driver_lock);
    struct physical *physical = vmm_from_handle(handle);
    bool ok = physical && !physical->is_imported && (physical->handle_types & type);
    int fd = ok ? fcntl(physical->fd, F_DUPFD_CLOEXEC, 0) : -1;
    pthread_mutex_unlock(&driver_lock);
    NEED(ok, CUDA_ERROR_INVALID_VALUE);
    NEED(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

/* The device a descriptor of ours belongs to, from the memfd's name; -1 for anything else. */
int vmm_device_of_fd(int fd)
{
    char link[64], target[128] = "", uuid[41];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, target, sizeof target - 1) < 0 || strncmp(target, "/memfd:software-gpu:", 20) != 0) return -1;
    for (int n = 0; n < device_count; n++) {
        uuid_text(devices[n].uuid, uuid);
        if (!strncmp(target + 20, uuid, 40)) return n;
    }
    return -1;
}

static bool is_host_fd(int fd)
{
    char link[64], target[64] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, target, sizeof target - 1) > 0 && strncmp(target, "/memfd:" HOST_MEMORY_NAME, strlen("/memfd:" HOST_MEMORY_NAME)) == 0;
}

static CUresult import_fd(CUmemGenericAllocationHandle *out, int shared)
{
    struct stat seen;
    int device = vmm_device_of_fd(shared);
    bool is_host = device < 0 && is_host_fd(shared);
    NEED((device >= 0 || is_host) && fstat(shared, &seen) == 0, CUDA_ERROR_INVALID_VALUE);
    if (!is_host) TRY(device_claim(device));
    int fd = fcntl(shared, F_DUPFD_CLOEXEC, 0);
    NEED(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    CUresult rc = vmm_keep((struct physical){.bytes = (size_t)seen.st_size, .device = device, .fd = fd, .handle_types = 1, .is_imported = true, .is_host = is_host}, out);
    if (rc != CUDA_SUCCESS) close(fd);
    return rc;
}

API(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *out, void *shared, int type), (out, shared, type))
{
    NEED(out && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&driver_lock);
    CUresult rc = import_fd(out, (int)(intptr_t)shared);
    pthread_mutex_unlock(&driver_lock);
    return rc;
}
