/* The table of address ranges the driver knows, and device memory made from memfds.
 *
 * The allocations of a process on one device are shared mappings of one memfd, its arena, so a process that holds device memory
 * shows it in /proc/PID/maps and a checkpoint has something to take away. Places in the arena are never used again; a freed one
 * is punched out, which gives its pages back. Other processes open the arena for legacy IPC (ipc.c).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "driver.h"

pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;
struct range **ranges; /* sorted by base */
size_t range_count;
static size_t range_room;
static uint64_t next_buffer_id = 1;

static size_t first_above(uint64_t address)
{
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle]->base > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

struct range *range_find(uint64_t address)
{
    size_t above = first_above(address);
    if (above == 0) return NULL;
    struct range *range = ranges[above - 1];
    return address - range->base < range->size ? range : NULL;
}

CUresult range_add(struct range content)
{
    if (range_count == range_room) {
        size_t room = range_room ? range_room * 2 : 64;
        struct range **grown = realloc(ranges, room * sizeof *grown);
        NEED(grown, CUDA_ERROR_OUT_OF_MEMORY);
        ranges = grown;
        range_room = room;
    }
    struct range *range = malloc(sizeof *range);
    NEED(range, CUDA_ERROR_OUT_OF_MEMORY);
    *range = content;
    range->buffer_id = next_buffer_id++;
    size_t at = first_above(range->base);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = range;
    range_count++;
    return CUDA_SUCCESS;
}

void range_remove(struct range *range)
{
    size_t at = first_above(range->base) - 1;
    memmove(ranges + at, ranges + at + 1, (range_count - at - 1) * sizeof *ranges);
    range_count--;
    free(range);
}

/* The name tells an importer which device the memory belongs to. */
int memory_new_memfd(int device, size_t bytes)
{
    char name[64], uuid[41];
    uuid_text(devices[device].uuid, uuid);
    snprintf(name, sizeof name, "software-gpu:%s", uuid);
    int fd = (int)syscall(SYS_memfd_create, name, 1u /* MFD_CLOEXEC */);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* `end` 0: none yet. It stays when the arena goes for a checkpoint, because the places stay. */
static struct { int fd; uint64_t end; } arenas[MAX_DEVICES];

int memory_arena(int device)
{
    if (arenas[device].end && arenas[device].fd >= 0) return arenas[device].fd;
    if (!arenas[device].end) arenas[device].end = ARENA_TABLE_BYTES;
    int fd = memory_new_memfd(device, arenas[device].end);
    arenas[device].fd = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 300);
    if (fd >= 0) close(fd);
    return arenas[device].fd;
}

void memory_close_arenas(void)
{
    for (int device = 0; device < MAX_DEVICES; device++) {
        if (!arenas[device].end) continue;
        if (arenas[device].fd >= 0) close(arenas[device].fd);
        arenas[device].fd = -1;
    }
}

static void *map_new_memory(int device, size_t span, uint64_t *offset)
{
    int fd = memory_arena(device);
    if (fd < 0 || ftruncate(fd, (off_t)(arenas[device].end + span)) != 0) return MAP_FAILED;
    *offset = arenas[device].end;
    void *address = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)*offset);
    if (address != MAP_FAILED) arenas[device].end += span;
    return address;
}

static void punch_out(const struct range *range)
{
    int fd = memory_arena(range->device);
    if (fd >= 0) (void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)range->offset, (off_t)range->span);
}

CUresult memory_allocate(CUcontext context, size_t bytes, bool is_offerable, uint64_t *address)
{
    uint64_t offset = 0;
    size_t span = ROUND_UP(bytes, PAGE);
    NEED(bytes > 0 && span >= bytes, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&driver_lock);
    CUresult rc = device_reserve(context->device, span);
    void *mapped = rc == CUDA_SUCCESS ? map_new_memory(context->device, span, &offset) : MAP_FAILED;
    if (rc == CUDA_SUCCESS) {
        struct range range = {.base = (uint64_t)mapped, .size = bytes, .span = span, .kind = RANGE_DEVICE, .device = context->device, .access = 3, .context = context,
                              .offset = offset, .is_offerable = is_offerable, .ipc_slot = -1};
        rc = mapped == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : range_add(range);
        if (rc != CUDA_SUCCESS) {
            device_give_back(context->device, span);
            if (mapped != MAP_FAILED) munmap(mapped, span);
        }
    }
    *address = (uint64_t)mapped;
    pthread_mutex_unlock(&driver_lock);
    return rc;
}

static void free_range(struct range *range)
{
    if (range->kind == RANGE_DEVICE) {
        device_give_back(range->device, range->span);
        ipc_withdraw(range);
        punch_out(range);
    }
    if (range->kind != RANGE_REGISTERED) munmap((void *)range->base, range->span);
    range_remove(range);
}

void memory_free_address(uint64_t address)
{
    pthread_mutex_lock(&driver_lock);
    struct range *range = range_find(address);
    if (range && range->base == address && range->kind != RANGE_MAPPED) free_range(range);
    pthread_mutex_unlock(&driver_lock);
}

/* VMM mappings outlive contexts; everything else of the context goes. */
void memory_free_context(CUcontext context)
{
    pthread_mutex_lock(&driver_lock);
    for (size_t n = range_count; n-- > 0;)
        if (ranges[n]->context == context) free_range(ranges[n]);
    pthread_mutex_unlock(&driver_lock);
}

static _Thread_local int acting_device = -1;

void memory_act_for(int device) { acting_device = device; }

int range_access(const struct range *range)
{
    int all = range->access;
    for (int n = 0; n < MAX_DEVICES; n++) all |= range->peer_access[n];
    return all;
}

/* A kernel reaches memory of cuMemCreate where cuMemSetAccess let its own device; copies reach what any device may. */
static int access_here(const struct range *range)
{
    if (range->kind != RANGE_MAPPED || acting_device < 0) return range_access(range);
    return acting_device == range->device ? range->access : range->peer_access[acting_device];
}

/* False when it is not there: the look is made while nobody can take it away. */
bool memory_load_word(uint64_t address, uint64_t *word)
{
    pthread_mutex_lock(&driver_lock);
    struct range *range = address % sizeof *word ? NULL : range_find(address);
    bool ok = range && (access_here(range) & 1);
    if (ok) *word = __atomic_load_n((uint64_t *)address, __ATOMIC_ACQUIRE);
    pthread_mutex_unlock(&driver_lock);
    return ok;
}

/* True when all of it is memory the device may touch; neighbouring ranges count as one. */
bool memory_is_device(uint64_t address, size_t bytes, bool write)
{
    bool ok = true;
    uint64_t end = address + bytes;
    pthread_mutex_lock(&driver_lock);
    do {
        struct range *range = range_find(address);
        int access = range ? access_here(range) : 0;
        ok = (access & 1) && (!write || (access & 2));
        if (ok) address = range->base + range->size;
    } while (ok && address < end);
    pthread_mutex_unlock(&driver_lock);
    return ok;
}

/* Ordinary memory of the process. Driver address space (ranges and reservations) is never that. */
bool memory_is_pageable_host(uint64_t address)
{
    pthread_mutex_lock(&driver_lock);
    bool known = range_find(address) != NULL || vmm_is_reserved(address);
    pthread_mutex_unlock(&driver_lock);
    return !known;
}
