/* Legacy IPC: memory of cuMemAlloc offered to other processes by a handle of 64 bytes.
 *
 * The handle says where the allocation lies in its process's arena; whoever opens it opens that memfd through /proc. A table at the
 * start of the arena tells which offers still hold. Memory of cuMemCreate, of pools and of modules is refused with
 * CUDA_ERROR_INVALID_VALUE, as the real driver does; so is a handle that is damaged, or whose memory is freed. One whose process is
 * gone is CUDA_ERROR_INVALID_HANDLE (measured), and the own process's handle CUDA_ERROR_INVALID_CONTEXT.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

#define HANDLE_MAGIC 0x43504955504753ull
#define SLOTS ((int)(ARENA_TABLE_BYTES / sizeof(uint64_t)))
#define LAZY_ENABLE_PEER_ACCESS 1

struct ipc_handle { char reserved[64]; };
struct content {
    uint64_t magic;
    struct ipc_name name;
    int fd, slot;
    uint64_t offset, bytes, check;
};
_Static_assert(sizeof(struct content) <= sizeof(struct ipc_handle), "a handle has 64 bytes");

static uint64_t check_of(const struct content *content)
{
    uint64_t sum = content->magic;
    uint64_t parts[] = {(uint64_t)content->name.pid, content->name.buffer_id, (uint64_t)content->fd, (uint64_t)content->slot, content->offset, content->bytes};
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) sum = (sum ^ parts[n]) * 0x100000001b3ull;
    return sum;
}

static bool set_slot(int arena, int slot, uint64_t buffer_id)
{
    return pwrite(arena, &buffer_id, sizeof buffer_id, (off_t)slot * (off_t)sizeof buffer_id) == sizeof buffer_id;
}

static uint64_t slot_of(int arena, int slot)
{
    uint64_t buffer_id = 0;
    bool ok = pread(arena, &buffer_id, sizeof buffer_id, (off_t)slot * (off_t)sizeof buffer_id) == sizeof buffer_id;
    return ok ? buffer_id : 0;
}

void ipc_withdraw(struct range *range)
{
    int arena = range->ipc_slot >= 0 ? memory_arena(range->device) : -1;
    if (arena >= 0) set_slot(arena, range->ipc_slot, 0);
    range->ipc_slot = -1;
}

bool ipc_has_opened(void)
{
    for (size_t n = 0; n < range_count; n++)
        if (ranges[n]->kind == RANGE_OPENED) return true;
    return false;
}

static CUresult offer(struct range *range, int arena)
{
    for (int slot = 0; slot < SLOTS && range->ipc_slot < 0; slot++)
        if (slot_of(arena, slot) == 0 && set_slot(arena, slot, range->buffer_id)) range->ipc_slot = slot;
    return range->ipc_slot >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult get_handle(struct content *out, uint64_t address)
{
    struct range *range = range_find(address);
    NEED(range && range->kind == RANGE_DEVICE && range->is_offerable, CUDA_ERROR_INVALID_VALUE);
    int arena = memory_arena(range->device);
    NEED(arena >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    TRY(offer(range, arena));
    *out = (struct content){.magic = HANDLE_MAGIC, .name = {getpid(), range->buffer_id}, .fd = arena, .slot = range->ipc_slot, .offset = range->offset, .bytes = range->size};
    out->check = check_of(out);
    return CUDA_SUCCESS;
}

API(cuIpcGetMemHandle, (struct ipc_handle *handle, CUdeviceptr address), (handle, address))
{
    struct content content;
    NEED(handle, CUDA_ERROR_INVALID_VALUE);
    NEED(context_current(), CUDA_ERROR_INVALID_CONTEXT);
    pthread_mutex_lock(&driver_lock);
    CUresult rc = get_handle(&content, address);
    pthread_mutex_unlock(&driver_lock);
    if (rc != CUDA_SUCCESS) return rc;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &content, sizeof content);
    return CUDA_SUCCESS;
}

static struct range *opened_before(const struct ipc_name *name, CUcontext context)
{
    for (size_t n = 0; n < range_count; n++) {
        struct range *range = ranges[n];
        bool is_it = range->kind == RANGE_OPENED && range->context == context && range->opened.pid == name->pid && range->opened.buffer_id == name->buffer_id;
        if (is_it) return range;
    }
    return NULL;
}

static CUresult map_arena(const struct content *content, int arena, CUcontext context, uint64_t *address)
{
    int device = vmm_device_of_fd(arena);
    NEED(device >= 0, CUDA_ERROR_INVALID_HANDLE); /* another process has the number now */
    NEED(slot_of(arena, content->slot) == content->name.buffer_id, CUDA_ERROR_INVALID_VALUE);
    TRY(device_claim(device));
    size_t span = ROUND_UP(content->bytes, PAGE);
    void *mapped = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_SHARED, arena, (off_t)content->offset);
    NEED(mapped != MAP_FAILED, CUDA_ERROR_MAP_FAILED);
    struct range range = {.base = (uint64_t)mapped, .size = content->bytes, .span = span, .kind = RANGE_OPENED, .device = device, .access = 3, .context = context, .opened = content->name, .references = 1, .ipc_slot = -1};
    CUresult rc = range_add(range);
    if (rc != CUDA_SUCCESS) munmap(mapped, span);
    *address = range.base;
    return rc;
}

static CUresult open_handle(const struct content *content, CUcontext context, uint64_t *address)
{
    struct range *before = opened_before(&content->name, context);
    if (before) {
        before->references++;
        *address = before->base;
        return CUDA_SUCCESS;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", content->name.pid, content->fd);
    int arena = open(path, O_RDWR | O_CLOEXEC);
    NEED(arena >= 0, CUDA_ERROR_INVALID_HANDLE);
    CUresult rc = map_arena(content, arena, context, address);
    close(arena);
    return rc;
}

API(cuIpcOpenMemHandle_v2, (CUdeviceptr *out, struct ipc_handle handle, unsigned flags), (out, handle, flags))
{
    CUcontext context = context_current();
    struct content content;
    uint64_t address = 0;
    NEED(out && flags == LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    memcpy(&content, &handle, sizeof content);
    NEED(content.magic == HANDLE_MAGIC && content.check == check_of(&content), CUDA_ERROR_INVALID_VALUE);
    NEED(content.slot >= 0 && content.slot < SLOTS, CUDA_ERROR_INVALID_VALUE);
    NEED(content.name.pid != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    pthread_mutex_lock(&driver_lock);
    CUresult rc = open_handle(&content, context, &address);
    pthread_mutex_unlock(&driver_lock);
    if (rc == CUDA_SUCCESS) *out = address;
    return rc;
}

/* The last reference goes after the work of the context, as with cuMemFree. */
API(cuIpcCloseMemHandle, (CUdeviceptr address), (address))
{
    NEED(context_current(), CUDA_ERROR_INVALID_CONTEXT);
    pthread_mutex_lock(&driver_lock);
    struct range *range = range_find(address);
    bool ok = range && range->kind == RANGE_OPENED && range->base == address && range->references > 0;
    bool is_last = ok && --range->references == 0;
    CUcontext context = ok ? range->context : NULL;
    if (is_last) range->opened.pid = 0; /* not to be found by who opens it again meanwhile */
    pthread_mutex_unlock(&driver_lock);
    NEED(ok, CUDA_ERROR_INVALID_VALUE);
    if (!is_last) return CUDA_SUCCESS;
    stream_wait_context(context);
    memory_free_address(address);
    return CUDA_SUCCESS;
}
