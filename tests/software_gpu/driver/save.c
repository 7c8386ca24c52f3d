/* Takes the device memory of this process into private host memory, and brings it back.
 *
 * Afterwards the process is plain: no descriptor, no mapping of a device; the device addresses stay reserved and unreadable.
 * Runs on the driver thread while the gate is closed and no work is left, so nothing else touches the tables. It allocates
 * with mmap only: other threads may be stopped inside malloc.
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

#define HIDDEN_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED)

bool save_has_managed(void)
{
    for (size_t n = 0; n < range_count; n++)
        if (ranges[n]->kind == RANGE_MANAGED) return true;
    return false;
}

static void *host_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void release(void **saved, size_t bytes)
{
    if (*saved) munmap(*saved, bytes);
    *saved = NULL;
}

static void release_all(void)
{
    for (size_t n = 0; n < range_count; n++) release(&ranges[n]->saved, ranges[n]->span);
    for (struct physical *p = all_physical; p; p = p->next) release(&p->saved, p->bytes);
}

/* Copies without changing anything: a failure here leaves the process locked and whole. */
static bool copy_out_physical(struct physical *physical)
{
    physical->saved = host_memory(physical->bytes);
    void *view = mmap(NULL, physical->bytes, PROT_READ, MAP_SHARED, physical->fd, 0);
    bool ok = physical->saved && view != MAP_FAILED;
    if (ok) memcpy(physical->saved, view, physical->bytes);
    if (view != MAP_FAILED) munmap(view, physical->bytes);
    return ok;
}

static bool copy_out_all(void)
{
    for (size_t n = 0; n < range_count; n++) {
        struct range *range = ranges[n];
        if (range->kind != RANGE_DEVICE) continue;
        if (!(range->saved = host_memory(range->span))) return false;
        memcpy(range->saved, (void *)range->base, range->span);
    }
    for (struct physical *p = all_physical; p; p = p->next)
        if (!copy_out_physical(p)) return false;
    return true;
}

static void hide_addresses(void)
{
    for (size_t n = 0; n < range_count; n++)
        if (ranges[n]->kind == RANGE_DEVICE || ranges[n]->kind == RANGE_MAPPED || ranges[n]->kind == RANGE_OPENED) mmap((void *)ranges[n]->base, ranges[n]->span, PROT_NONE, HIDDEN_FLAGS, -1, 0);
    for (struct physical *p = all_physical; p; p = p->next) {
        close(p->fd);
        p->fd = -1;
    }
    memory_close_arenas();
}

CUresult save_memory(void)
{
    if (!copy_out_all()) {
        release_all();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    hide_addresses();
    device_close_all();
    return CUDA_SUCCESS;
}

static bool fill_memfd(int fd, const char *content, size_t bytes, size_t offset)
{
    while (bytes > 0) {
        ssize_t written = pwrite(fd, content, bytes, (off_t)offset);
        if (written <= 0) return false;
        content += written;
        offset += (size_t)written;
        bytes -= (size_t)written;
    }
    return true;
}

static bool map_at(uint64_t base, size_t span, int access, int fd, size_t offset)
{
    int protection = access == 3 ? PROT_READ | PROT_WRITE : access == 1 ? PROT_READ : PROT_NONE;
    return mmap((void *)base, span, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) != MAP_FAILED;
}

static bool bring_back_device_range(struct range *range)
{
    int fd = memory_arena(range->device);
    bool ok = fd >= 0 && fill_memfd(fd, range->saved, range->span, range->offset) && map_at(range->base, range->span, 3, fd, range->offset);
    range->ipc_slot = -1; /* the table is a new one, and older importers keep the old memory */
    release(&range->saved, range->span);
    return ok;
}

static bool bring_back_physical(struct physical *physical)
{
    physical->fd = memory_new_memfd(physical->device, physical->bytes);
    bool ok = physical->fd >= 0 && fill_memfd(physical->fd, physical->saved, physical->bytes, 0);
    release(&physical->saved, physical->bytes);
    return ok;
}

static bool bring_back_all(void)
{
    bool ok = true;
    for (struct physical *p = all_physical; p && ok; p = p->next) ok = bring_back_physical(p);
    for (size_t n = 0; n < range_count && ok; n++) {
        struct range *range = ranges[n];
        if (range->kind == RANGE_DEVICE) ok = bring_back_device_range(range);
        if (range->kind == RANGE_MAPPED) ok = map_at(range->base, range->span, range_access(range), range->physical->fd, range->offset);
    }
    return ok;
}

/* Refusals of device_rebind change nothing and may be tried again; a failure after it is the end of the process's CUDA. */
CUresult restore_memory(const CUcheckpointGpuPair *pairs, unsigned count)
{
    TRY(device_rebind(pairs, count));
    return bring_back_all() ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
