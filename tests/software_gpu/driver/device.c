/* The devices of this process: identity from the state files, memory accounting in a slot of each, the device nodes held open. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "control.h"
#include "driver.h"

struct device devices[MAX_DEVICES];
int device_count;
static int shared_node_fds[2] = {-1, -1}; /* nvidiactl, nvidia-uvm */

/* A node that does not exist is skipped: hosts without nodes test everything but the CRIU obstacle. One that exists and
 * cannot be opened means no device, as for a container whose device cgroup denies it. */
static CUresult open_node(const char *name, int *fd)
{
    char path[512];
    const char *dir = getenv("SOFTWARE_GPU_NODE_DIR");
    snprintf(path, sizeof path, "%s/%s", dir && *dir ? dir : "/dev", name);
    *fd = open(path, O_RDWR | O_CLOEXEC);
    return *fd >= 0 || errno == ENOENT ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static CUresult open_shared_nodes(void)
{
    TRY(open_node("nvidiactl", &shared_node_fds[0]));
    return open_node("nvidia-uvm", &shared_node_fds[1]);
}

static CUresult open_device(struct device *device)
{
    char node[32];
    snprintf(node, sizeof node, "nvidia%d", device->state_ordinal);
    TRY(open_node(node, &device->node_fd));
    device->state_fd = state_open(device->state_ordinal);
    return device->state_fd < 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

CUresult device_open_all(void)
{
    struct state_header headers[MAX_DEVICES];
    int found = state_list(headers);
    NEED(found > 0, CUDA_ERROR_NO_DEVICE);
    for (int n = 0; n < found; n++) {
        devices[n] = (struct device){.memory_bytes = headers[n].memory_bytes, .state_fd = -1, .slot = -1, .node_fd = -1, .state_ordinal = n};
        memcpy(devices[n].uuid, headers[n].uuid, 16);
    }
    device_count = found;
    software_gpu_control.device_count = (uint32_t)found;
    TRY(open_shared_nodes());
    for (int n = 0; n < found; n++) TRY(open_device(&devices[n]));
    return CUDA_SUCCESS;
}

void device_close_all(void)
{
    for (int n = 0; n < device_count; n++) {
        close_fd(&devices[n].state_fd); /* drops the slot's lock */
        close_fd(&devices[n].node_fd);
        devices[n].slot = -1;
    }
    close_fd(&shared_node_fds[0]);
    close_fd(&shared_node_fds[1]);
}

bool device_is_any_open(void)
{
    for (int n = 0; n < device_count; n++)
        if (devices[n].state_fd >= 0) return true;
    return false;
}

/* A process takes its slot with its first context on the device, so only such processes show up in NVML. */
CUresult device_claim(int ordinal)
{
    struct device *device = &devices[ordinal];
    device->is_in_use = true;
    if (device->slot >= 0) return CUDA_SUCCESS;
    device->slot = state_claim_slot(device->state_fd);
    return device->slot < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult device_reserve(int ordinal, uint64_t bytes)
{
    struct device *device = &devices[ordinal];
    uint64_t after = device->used_bytes + bytes;
    NEED(after >= bytes && after <= device->memory_bytes, CUDA_ERROR_OUT_OF_MEMORY);
    NEED(state_set_used(device->state_fd, device->slot, device->used_bytes, after, device->memory_bytes), CUDA_ERROR_OUT_OF_MEMORY);
    device->used_bytes = software_gpu_control.used_bytes[ordinal] = after;
    return CUDA_SUCCESS;
}

void device_give_back(int ordinal, uint64_t bytes)
{
    struct device *device = &devices[ordinal];
    uint64_t after = device->used_bytes - bytes;
    state_set_used(device->state_fd, device->slot, device->used_bytes, after, device->memory_bytes);
    device->used_bytes = software_gpu_control.used_bytes[ordinal] = after;
}

bool device_is_valid(int ordinal) { return ordinal >= 0 && ordinal < device_count && !devices[ordinal].is_lost; }

static int find_uuid(const struct state_header *headers, int count, const void *uuid)
{
    for (int n = 0; n < count; n++)
        if (!memcmp(headers[n].uuid, uuid, 16)) return n;
    return -1;
}

static const void *mapped_uuid(const struct device *device, const CUcheckpointGpuPair *pairs, unsigned count)
{
    if (count == 0) return device->uuid;
    for (unsigned n = 0; n < count; n++)
        if (!memcmp(pairs[n].oldUuid.bytes, device->uuid, 16)) return pairs[n].newUuid.bytes;
    return NULL;
}

/* Chooses a state file for each device: by the map or by equal UUID where the process used it; a device it never used takes
 * the same UUID or any file that is left, else it is lost. chosen[n] = -1 for lost. */
static CUresult choose_targets(const CUcheckpointGpuPair *pairs, unsigned pair_count, const struct state_header *headers, int found, int chosen[])
{
    bool taken[MAX_DEVICES] = {false};
    for (int n = 0; n < device_count; n++) {
        chosen[n] = -1;
        if (!devices[n].is_in_use) continue;
        const void *uuid = mapped_uuid(&devices[n], pairs, pair_count);
        NEED(uuid, CUDA_ERROR_INVALID_VALUE); /* a map must name every device that was checkpointed */
        chosen[n] = find_uuid(headers, found, uuid);
        NEED(chosen[n] >= 0, CUDA_ERROR_INVALID_DEVICE);
        NEED(!taken[chosen[n]], CUDA_ERROR_INVALID_VALUE);
        taken[chosen[n]] = true;
    }
    for (int n = 0; n < device_count; n++) {
        if (devices[n].is_in_use) continue;
        int same = find_uuid(headers, found, devices[n].uuid);
        if (same < 0 || taken[same])
            for (same = 0; same < found && taken[same]; same++) {}
        if (same < found) taken[chosen[n] = same] = true;
    }
    return CUDA_SUCCESS;
}

static CUresult occupy(struct device *device)
{
    TRY(open_device(device));
    if (!device->is_in_use) return CUDA_SUCCESS;
    device->slot = state_claim_slot(device->state_fd);
    NEED(device->slot >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    bool fits = state_set_used(device->state_fd, device->slot, 0, device->used_bytes, device->memory_bytes);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult occupy_all(const struct state_header *headers, const int chosen[])
{
    TRY(open_shared_nodes());
    for (int n = 0; n < device_count; n++) {
        devices[n].is_lost = chosen[n] < 0;
        if (devices[n].is_lost) continue;
        devices[n].state_ordinal = chosen[n];
        devices[n].memory_bytes = headers[chosen[n]].memory_bytes;
        memcpy(devices[n].uuid, headers[chosen[n]].uuid, 16);
        TRY(occupy(&devices[n]));
    }
    return CUDA_SUCCESS;
}

/* All or nothing: a refusal leaves the process without devices, under the identities it was checkpointed with. */
CUresult device_rebind(const CUcheckpointGpuPair *pairs, unsigned count)
{
    struct state_header headers[MAX_DEVICES];
    struct device before[MAX_DEVICES];
    int chosen[MAX_DEVICES];
    state_make_from_environment();
    int found = state_list(headers);
    NEED(found > 0, CUDA_ERROR_NO_DEVICE);
    TRY(choose_targets(pairs, count, headers, found, chosen));
    memcpy(before, devices, sizeof before);
    CUresult rc = occupy_all(headers, chosen);
    if (rc != CUDA_SUCCESS) {
        device_close_all();
        memcpy(devices, before, sizeof before);
    }
    return rc;
}
