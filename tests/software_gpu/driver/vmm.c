/* Virtual memory management: reserved address ranges, physical memory behind handles, mappings.
 *
 * Physical memory is a memfd. A handle keeps one reference, each mapping another; the memory goes with the last one.
 * Memory can be of a NUMA node of the host as well; its device is -1.
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "driver.h"

#define PHYSICAL_MAGIC 0x6c617369796870ull

struct reservation { uint64_t base, size; struct reservation *next; };
static struct reservation *reservations;
struct physical *all_physical;

struct physical *vmm_from_handle(CUmemGenericAllocationHandle handle)
{
    for (struct physical *p = all_physical; p; p = p->next)
        if ((uint64_t)p == handle) return p;
    return NULL;
}

static void drop(struct physical *physical)
{
    if (--physical->references > 0) return;
    struct physical **link = &all_physical;
    while (*link != physical) link = &(*link)->next;
    *link = physical->next;
    if (!physical->is_imported && !physical->is_host) device_give_back(physical->device, physical->bytes);
    close(physical->fd);
    free(physical);
}

CUresult vmm_keep(struct physical content, CUmemGenericAllocationHandle *out)
{
    struct physical *physical = malloc(sizeof *physical);
    NEED(physical, CUDA_ERROR_OUT_OF_MEMORY);
    *physical = content;
    physical->magic = PHYSICAL_MAGIC;
    physical->references = 1;
    physical->next = all_physical;
    all_physical = physical;
    *out = (uint64_t)physical;
    return CUDA_SUCCESS;
}

bool vmm_has_imports(void)
{
    for (struct physical *p = all_physical; p; p = p->next)
        if (p->is_imported) return true;
    return ipc_has_opened();
}

bool vmm_has_host(void)
{
    for (struct physical *p = all_physical; p; p = p->next)
        if (p->is_host && !p->is_imported) return true;
    return false;
}

bool vmm_is_reserved(uint64_t address)
{
    for (struct reservation *r = reservations; r; r = r->next)
        if (address - r->base < r->size) return true;
    return false;
}

static struct reservation **reservation_around(uint64_t base, uint64_t size)
{
    struct reservation **link = &reservations;
    while (*link && !(base >= (*link)->base && base + size <= (*link)->base + (*link)->size)) link = &(*link)->next;
    return *link ? link : NULL;
}

static bool overlaps_mapping(uint64_t base, uint64_t size)
{
    for (size_t n = 0; n < range_count; n++)
        if (ranges[n]->base < base + size && base < ranges[n]->base + ranges[n]->size) return true;
    return false;
}

static void *reserve_aligned(size_t size, size_t alignment, uint64_t hint)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint) {
        void *there = mmap((void *)hint, size, PROT_NONE, flags, -1, 0);
        if (there == (void *)hint) return there;
        if (there != MAP_FAILED) munmap(there, size);
    }
    char *wide = mmap(NULL, size + alignment, PROT_NONE, flags, -1, 0);
    if (wide == MAP_FAILED) return MAP_FAILED;
    char *start = (char *)ROUND_UP((uint64_t)wide, alignment);
    if (start > wide) munmap(wide, (size_t)(start - wide));
    if (wide + alignment > start) munmap(start + size, (size_t)(wide + alignment - start));
    return start;
}

API(cuMemAddressReserve, (CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags), (out, size, alignment, hint, flags))
{
    NEED(out && size && size % GRANULARITY == 0 && flags == 0 && (alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    struct reservation *reservation = malloc(sizeof *reservation);
    NEED(reservation, CUDA_ERROR_OUT_OF_MEMORY);
    void *base = reserve_aligned(size, alignment > GRANULARITY ? alignment : GRANULARITY, hint % GRANULARITY ? 0 : hint);
    if (base == MAP_FAILED) {
        free(reservation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&driver_lock);
    *reservation = (struct reservation){(uint64_t)base, size, reservations};
    reservations = reservation;
    pthread_mutex_unlock(&driver_lock);
    *out = (uint64_t)base;
    return CUDA_SUCCESS;
}

static CUresult address_free(uint64_t base, size_t size)
{
    struct reservation **link = reservation_around(base, size);
    NEED(link && (*link)->base == base && (*link)->size == size && !overlaps_mapping(base, size), CUDA_ERROR_INVALID_VALUE);
    struct reservation *gone = *link;
    *link = gone->next;
    free(gone);
    munmap((void *)base, size);
    return CUDA_SUCCESS;
}

API(cuMemAddressFree, (CUdeviceptr base, size_t size), (base, size))
{
    pthread_mutex_lock(&driver_lock);
    CUresult rc = address_free(base, size);
    pthread_mutex_unlock(&driver_lock);
    return rc;
}

static CUresult check_properties(const CUmemAllocationProp *wanted)
{
    NEED(wanted && wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    bool is_host = wanted->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    NEED(is_host || wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    NEED(is_host ? wanted->location.id == 0 : device_is_valid(wanted->location.id), CUDA_ERROR_INVALID_DEVICE);
    NEED(!(wanted->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), CUDA_ERROR_NOT_SUPPORTED);
    return CUDA_SUCCESS;
}

API(cuMemGetAllocationGranularity, (size_t *out, const CUmemAllocationProp *wanted, int option), (out, wanted, option))
{
    NEED(out && (option == 0 || option == 1), CUDA_ERROR_INVALID_VALUE);
    TRY(check_properties(wanted));
    *out = GRANULARITY;
    return CUDA_SUCCESS;
}

static int host_memfd(size_t bytes)
{
    int fd = (int)syscall(SYS_memfd_create, HOST_MEMORY_NAME, 1u /* MFD_CLOEXEC */);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) == 0) return fd;
    close(fd);
    return -1;
}

static CUresult create_on_host(CUmemGenericAllocationHandle *out, size_t size, int handle_types)
{
    int fd = host_memfd(size);
    NEED(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult rc = vmm_keep((struct physical){.bytes = size, .device = -1, .fd = fd, .handle_types = handle_types, .is_host = true}, out);
    if (rc != CUDA_SUCCESS) close(fd);
    return rc;
}

static CUresult create_physical(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *wanted)
{
    int device = wanted->location.id;
    if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return create_on_host(out, size, wanted->requestedHandleTypes);
    TRY(device_claim(device));
    TRY(device_reserve(device, size));
    int fd = memory_new_memfd(device, size);
    CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (fd >= 0) rc = vmm_keep((struct physical){.bytes = size, .device = device, .fd = fd, .handle_types = wanted->requestedHandleTypes}, out);
    if (rc != CUDA_SUCCESS) {
        if (fd >= 0) close(fd);
        device_give_back(device, size);
    }
    return rc;
}

API(cuMemCreate, (CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags), (out, size, wanted, flags))
{
    NEED(out && size && size % GRANULARITY == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    TRY(check_properties(wanted));
    pthread_mutex_lock(&driver_lock);
    CUresult rc = create_physical(out, size, wanted);
    pthread_mutex_unlock(&driver_lock);
    return rc;
}

API(cuMemRelease, (CUmemGenericAllocationHandle handle), (handle))
{
    pthread_mutex_lock(&driver_lock);
    struct physical *physical = vmm_from_handle(handle);
    if (physical) drop(physical);
    pthread_mutex_unlock(&driver_lock);
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult map(uint64_t base, size_t size, size_t offset, CUmemGenericAllocationHandle handle)
{
    struct physical *physical = vmm_from_handle(handle);
    NEED(physical && offset + size <= physical->bytes && reservation_around(base, size), CUDA_ERROR_INVALID_VALUE);
    NEED(!overlaps_mapping(base, size), CUDA_ERROR_ALREADY_MAPPED);
    void *mapped = mmap((void *)base, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, (off_t)offset);
    NEED(mapped != MAP_FAILED, CUDA_ERROR_MAP_FAILED);
    struct range range = {.base = base, .size = size, .span = size, .kind = RANGE_MAPPED, .device = physical->device, .physical = physical, .offset = offset};
    TRY(range_add(range));
    physical->references++;
    return CUDA_SUCCESS;
}

API(cuMemMap, (CUdeviceptr base, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags), (base, size, offset, handle, flags))
{
    NEED(size && (base | size | offset) % GRANULARITY == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&driver_lock);
    CUresult rc = map(base, size, offset, handle);
    pthread_mutex_unlock(&driver_lock);
    return rc;
}

/* Both ends must be ends of mappings, and there must be no hole. */
static bool covers_whole_mappings(uint64_t base, uint64_t size)
{
    uint64_t at = base;
    while (at < base + size) {
        struct range *range = range_find(at);
        if (!range || range->kind != RANGE_MAPPED || range->base != at) return false;
        at += range->size;
    }
    return at == base + size;
}

static void unmap_one(struct range *range)
{
    mmap((void *)range->base, range->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    struct physical *physical = range->physical;
    range_remove(range);
    drop(physical);
}

API(cuMemUnmap, (CUdeviceptr base, size_t size), (base, size))
{
    stream_wait_context(NULL); /* work in flight may use it */
    pthread_mutex_lock(&driver_lock);
    bool ok = size && covers_whole_mappings(base, size);
    for (uint64_t at = base; ok && at < base + size;) {
        struct range *range = range_find(at);
        at += range->size;
        unmap_one(range);
    }
    pthread_mutex_unlock(&driver_lock);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The pages of the process allow what any device may do; kernels of each are held to what theirs may (memory_is_device). */
static CUresult set_access(uint64_t base, size_t size, int device, int access)
{
    NEED(covers_whole_mappings(base, size), CUDA_ERROR_INVALID_VALUE);
    for (uint64_t at = base; at < base + size;) {
        struct range *range = range_find(at);
        if (device == range->device) range->access = access;
        else range->peer_access[device] = (unsigned char)access;
        int all = range_access(range), protection = all == 3 ? PROT_READ | PROT_WRITE : all == 1 ? PROT_READ : PROT_NONE;
        NEED(mprotect((void *)range->base, range->size, protection) == 0, CUDA_ERROR_OPERATING_SYSTEM);
        at += range->size;
    }
    return CUDA_SUCCESS;
}

/* A device, -1: the host, which reaches its own memory alone, -2: neither. */
static int place_of(const CUmemLocation *location, const struct range *range)
{
    bool is_host = range && range->physical && range->physical->is_host;
    if (location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA && location->id == 0 && is_host) return -1;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE && device_is_valid(location->id) ? location->id : -2;
}

API(cuMemSetAccess, (CUdeviceptr base, size_t size, const CUmemAccessDesc *wanted, size_t count), (base, size, wanted, count))
{
    NEED(wanted && count > 0 && size, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = CUDA_SUCCESS;
    pthread_mutex_lock(&driver_lock);
    for (size_t n = 0; n < count && rc == CUDA_SUCCESS; n++) {
        int device = place_of(&wanted[n].location, range_find(base));
        rc = device >= -1 ? set_access(base, size, device, wanted[n].flags) : CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&driver_lock);
    return rc;
}

API(cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address), (flags, location, address))
{
    NEED(flags && location, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&driver_lock);
    struct range *range = range_find(address);
    int device = place_of(location, range);
    bool ok = range && range->kind == RANGE_MAPPED && device >= -1;
    if (ok) *flags = device == range->device ? (unsigned long long)range->access : range->peer_access[device];
    pthread_mutex_unlock(&driver_lock);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *out, void *address), (out, address))
{
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&driver_lock);
    struct range *range = range_find((uint64_t)address);
    bool ok = range && range->kind == RANGE_MAPPED;
    if (ok) {
        range->physical->references++;
        *out = (uint64_t)range->physical;
    }
    pthread_mutex_unlock(&driver_lock);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *out, CUmemGenericAllocationHandle handle), (out, handle))
{
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&driver_lock);
    struct physical *physical = vmm_from_handle(handle);
    if (physical)
        *out = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = physical->handle_types,
                                     .location = {CU_MEM_LOCATION_TYPE_DEVICE, physical->device}};
    if (physical && physical->is_host) out->location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    pthread_mutex_unlock(&driver_lock);
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
