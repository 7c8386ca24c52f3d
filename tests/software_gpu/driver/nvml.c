/* libnvidia-ml.so.1 for the software GPUs: reads the device state files, nothing else.
 *
 * Reports processes by the caller's pids: an owner's slot holds its pid in its own namespace and that namespace's inode.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state_file.h"

#define EXPORT __attribute__((visibility("default")))
#define NEED(condition, code) \
    do { if (!(condition)) return (code); } while (0)

enum { NVML_SUCCESS = 0, NVML_UNINITIALIZED = 1, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6,
       NVML_INSUFFICIENT_SIZE = 7, NVML_DRIVER_NOT_LOADED = 9, NVML_UNKNOWN = 999 };

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
typedef struct nvml_device *nvmlDevice_t; /* ordinal + 1 */

static struct state_header headers[MAX_DEVICES];
static int device_count, users;

static int ordinal_of(nvmlDevice_t device) { return (int)(intptr_t)device - 1; }
static bool is_device(nvmlDevice_t device) { return users > 0 && ordinal_of(device) >= 0 && ordinal_of(device) < device_count; }

EXPORT int nvmlInit_v2(void)
{
    if (users == 0) {
        state_make_from_environment();
        device_count = state_list(headers);
        NEED(device_count > 0, NVML_DRIVER_NOT_LOADED);
    }
    users++;
    return NVML_SUCCESS;
}

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return nvmlInit_v2();
}

EXPORT int nvmlShutdown(void)
{
    NEED(users > 0, NVML_UNINITIALIZED);
    users--;
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(int code)
{
    switch (code) {
    case NVML_SUCCESS: return "The operation was successful";
    case NVML_UNINITIALIZED: return "NVML was not first initialized";
    case NVML_INVALID_ARGUMENT: return "A supplied argument is invalid";
    case NVML_NOT_SUPPORTED: return "The requested operation is not available on target device";
    case NVML_NOT_FOUND: return "A query to find an object was unsuccessful";
    case NVML_INSUFFICIENT_SIZE: return "An input argument is not large enough";
    case NVML_DRIVER_NOT_LOADED: return "NVIDIA driver is not loaded";
    default: return "An internal driver error occurred";
    }
}

static int copy_text(char *out, unsigned room, const char *text)
{
    NEED(out, NVML_INVALID_ARGUMENT);
    NEED(strlen(text) < room, NVML_INSUFFICIENT_SIZE);
    strcpy(out, text);
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned room) { return users ? copy_text(out, room, DRIVER_RELEASE) : NVML_UNINITIALIZED; }
EXPORT int nvmlSystemGetNVMLVersion(char *out, unsigned room) { return users ? copy_text(out, room, "13." DRIVER_RELEASE) : NVML_UNINITIALIZED; }

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    NEED(version, NVML_INVALID_ARGUMENT);
    *version = DRIVER_VERSION;
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    NEED(users, NVML_UNINITIALIZED);
    NEED(count, NVML_INVALID_ARGUMENT);
    *count = (unsigned)device_count;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    NEED(users, NVML_UNINITIALIZED);
    NEED(out && index < (unsigned)device_count, NVML_INVALID_ARGUMENT);
    *out = (nvmlDevice_t)(intptr_t)(index + 1);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    char text[41];
    NEED(users, NVML_UNINITIALIZED);
    NEED(uuid && out, NVML_INVALID_ARGUMENT);
    for (int n = 0; n < device_count; n++) {
        uuid_text(headers[n].uuid, text);
        if (!strcmp(text, uuid)) return nvmlDeviceGetHandleByIndex_v2((unsigned)n, out);
    }
    return NVML_NOT_FOUND;
}

EXPORT int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    NEED(is_device(device) && index, NVML_INVALID_ARGUMENT);
    *index = (unsigned)ordinal_of(device);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) { return nvmlDeviceGetIndex(device, minor); }

EXPORT int nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned room)
{
    char text[41];
    NEED(is_device(device), NVML_INVALID_ARGUMENT);
    uuid_text(headers[ordinal_of(device)].uuid, text);
    return copy_text(out, room, text);
}

EXPORT int nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned room)
{
    NEED(is_device(device), NVML_INVALID_ARGUMENT);
    return copy_text(out, room, DEVICE_NAME);
}

static int used_bytes(nvmlDevice_t device, unsigned long long *used)
{
    NEED(is_device(device), NVML_INVALID_ARGUMENT);
    int fd = state_open(ordinal_of(device));
    NEED(fd >= 0, NVML_UNKNOWN);
    *used = state_used(fd, -1);
    close(fd);
    return NVML_SUCCESS;
}

static unsigned long long free_bytes(nvmlDevice_t device, unsigned long long used)
{
    unsigned long long total = headers[ordinal_of(device)].memory_bytes;
    return used < total ? total - used : 0;
}

EXPORT int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *out)
{
    unsigned long long used;
    NEED(out, NVML_INVALID_ARGUMENT);
    int rc = used_bytes(device, &used);
    if (rc == NVML_SUCCESS) *out = (struct memory){headers[ordinal_of(device)].memory_bytes, free_bytes(device, used), used};
    return rc;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *out)
{
    unsigned long long used;
    NEED(out, NVML_INVALID_ARGUMENT);
    int rc = used_bytes(device, &used);
    if (rc == NVML_SUCCESS)
        *out = (struct memory_v2){out->version, headers[ordinal_of(device)].memory_bytes, 0, free_bytes(device, used), used};
    return rc;
}

static int innermost_pid(const char *pid)
{
    char path[64], line[256];
    int last = -1;
    snprintf(path, sizeof path, "/proc/%.20s/status", pid);
    FILE *status = fopen(path, "re");
    if (!status) return -1;
    while (last < 0 && fgets(line, sizeof line, status))
        if (!strncmp(line, "NSpid:", 6)) last = atoi(strrchr(line, '\t') + 1);
    fclose(status);
    return last;
}

/* 0 where the owner is not visible to the caller. */
static int visible_pid(const struct state_slot *owner)
{
    char path[64];
    struct stat ns;
    int found = 0;
    DIR *proc = opendir("/proc");
    if (!proc) return 0;
    for (struct dirent *entry = readdir(proc); entry && !found; entry = readdir(proc)) {
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9' || innermost_pid(entry->d_name) != owner->ns_pid) continue;
        snprintf(path, sizeof path, "/proc/%.20s/ns/pid", entry->d_name);
        if (stat(path, &ns) == 0 && ns.st_ino == owner->pid_namespace) found = atoi(entry->d_name);
    }
    closedir(proc);
    return found;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process *out)
{
    static _Thread_local struct state_slot owners[STATE_SLOTS];
    NEED(is_device(device) && count, NVML_INVALID_ARGUMENT);
    unsigned room = *count, found = 0;
    int fd = state_open(ordinal_of(device));
    NEED(fd >= 0, NVML_UNKNOWN);
    int owner_count = state_owners(fd, owners);
    close(fd);
    for (int n = 0; n < owner_count; n++) {
        int pid = visible_pid(&owners[n]);
        if (!pid) continue;
        if (out && found < room) out[found] = (struct process){(unsigned)pid, owners[n].used_bytes, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process *out)
{
    (void)out;
    NEED(is_device(device) && count, NVML_INVALID_ARGUMENT);
    *count = 0;
    return NVML_SUCCESS;
}

/* ---- How the devices are connected: $SOFTWARE_GPU_DIR/links, a line "A B REACHES NVLINKS SWITCHED" for each pair that is
 * not as usual; without it every device reaches every other one and there is no NVLink. */

enum { MAX_NVLINKS = 18, NVLINK_TO_GPU = 0, NVLINK_TO_SWITCH = 2, P2P_OK = 0, P2P_UNSUPPORTED = 5, P2P_NVLINK = 2,
       LEVEL_NODE = 40, SWITCH_BUS = 0xf0 };

struct connection { int reaches, nvlinks, is_switched; };
struct pci_info { char bus_id_legacy[16]; unsigned domain, bus, device, pci_device_id, pci_sub_system_id; char bus_id[32]; };

static struct connection connection_of(int a, int b)
{
    struct connection found = {1, 0, 0}, read;
    char path[512];
    int first, second;
    snprintf(path, sizeof path, "%s/links", state_dir());
    FILE *file = fopen(path, "re");
    if (!file) return found;
    while (fscanf(file, "%d %d %d %d %d", &first, &second, &read.reaches, &read.nvlinks, &read.is_switched) == 5)
        if ((first == a && second == b) || (first == b && second == a)) found = read;
    fclose(file);
    return found;
}

/* Number `link` of a device's NVLinks leads to this device; -1 where there is no such link. */
static int nvlink_peer(int ordinal, unsigned link)
{
    for (int other = 0; other < device_count; other++) {
        unsigned count = other == ordinal ? 0 : (unsigned)connection_of(ordinal, other).nvlinks;
        if (link < count) return other;
        link -= count;
    }
    return -1;
}

static int fill_pci(struct pci_info *out, unsigned bus)
{
    NEED(out, NVML_INVALID_ARGUMENT);
    *out = (struct pci_info){.bus = bus};
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", bus);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "0000:%02X:00.0", bus);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *out)
{
    NEED(is_device(device), NVML_INVALID_ARGUMENT);
    return fill_pci(out, (unsigned)ordinal_of(device) + 1);
}

EXPORT int nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, int what, int *status)
{
    NEED(is_device(a) && is_device(b) && a != b && status, NVML_INVALID_ARGUMENT);
    struct connection found = connection_of(ordinal_of(a), ordinal_of(b));
    *status = (what == P2P_NVLINK ? found.nvlinks : found.reaches) ? P2P_OK : P2P_UNSUPPORTED;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, int *level)
{
    NEED(is_device(a) && is_device(b) && level, NVML_INVALID_ARGUMENT);
    *level = a == b ? 0 : LEVEL_NODE;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, int *is_active)
{
    NEED(is_device(device) && is_active && link < MAX_NVLINKS, NVML_INVALID_ARGUMENT);
    *is_active = nvlink_peer(ordinal_of(device), link) >= 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, int *type)
{
    NEED(is_device(device) && type, NVML_INVALID_ARGUMENT);
    int other = nvlink_peer(ordinal_of(device), link);
    NEED(other >= 0, NVML_NOT_SUPPORTED);
    *type = connection_of(ordinal_of(device), other).is_switched ? NVLINK_TO_SWITCH : NVLINK_TO_GPU;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, struct pci_info *out)
{
    NEED(is_device(device), NVML_INVALID_ARGUMENT);
    int other = nvlink_peer(ordinal_of(device), link);
    NEED(other >= 0, NVML_NOT_SUPPORTED);
    return fill_pci(out, connection_of(ordinal_of(device), other).is_switched ? SWITCH_BUS : (unsigned)other + 1);
}
