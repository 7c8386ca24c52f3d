/* cuMemAlloc, cuMemFree, host memory, managed memory, and what a program may ask about a pointer. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "driver.h"

API(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total), (free_bytes, total))
{
    CUcontext context = context_current();
    NEED(free_bytes && total, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    struct device *device = &devices[context->device];
    uint64_t used = state_used(device->state_fd, device->slot);
    *total = device->memory_bytes;
    *free_bytes = used < *total ? *total - used : 0;
    return CUDA_SUCCESS;
}

API(cuMemAlloc_v2, (CUdeviceptr *out, size_t bytes), (out, bytes))
{
    CUcontext context = context_current();
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    uint64_t address;
    TRY(memory_allocate(context, bytes, true, &address));
    *out = address;
    return CUDA_SUCCESS;
}

API(cuMemAllocPitch_v2, (CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element), (out, pitch, width, height, element))
{
    CUcontext context = context_current();
    NEED(out && pitch && width && height && element, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    *pitch = ROUND_UP(width, 512);
    uint64_t address;
    TRY(memory_allocate(context, *pitch * height, true, &address));
    *out = address;
    return CUDA_SUCCESS;
}

static bool is_freeable(const struct range *range, uint64_t address, enum range_kind kind, enum range_kind other)
{
    return range && range->base == address && (range->kind == kind || range->kind == other);
}

/* As with the real driver, freeing waits for the work of the context. */
static CUresult free_kinds(uint64_t address, enum range_kind kind, enum range_kind other)
{
    pthread_mutex_lock(&driver_lock);
    struct range *range = range_find(address);
    bool ok = is_freeable(range, address, kind, other);
    CUcontext context = ok ? range->context : NULL;
    pthread_mutex_unlock(&driver_lock);
    NEED(ok, CUDA_ERROR_INVALID_VALUE);
    stream_wait_context(context);
    memory_free_address(address);
    return CUDA_SUCCESS;
}

API(cuMemFree_v2, (CUdeviceptr address), (address)) { return address ? free_kinds(address, RANGE_DEVICE, RANGE_MANAGED) : CUDA_SUCCESS; }

static CUresult anonymous(size_t bytes, enum range_kind kind, unsigned flags, uint64_t *out)
{
    CUcontext context = context_current();
    NEED(bytes > 0, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    size_t span = ROUND_UP(bytes, PAGE);
    void *mapped = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(mapped != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    struct range range = {.base = (uint64_t)mapped, .size = bytes, .span = span, .kind = kind, .device = context->device, .access = 3, .flags = flags, .context = context};
    pthread_mutex_lock(&driver_lock);
    CUresult rc = range_add(range);
    pthread_mutex_unlock(&driver_lock);
    if (rc != CUDA_SUCCESS) munmap(mapped, span);
    *out = (uint64_t)mapped;
    return rc;
}

API(cuMemAllocManaged, (CUdeviceptr *out, size_t bytes, unsigned flags), (out, bytes, flags))
{
    NEED(out && (flags == 1 || flags == 2), CUDA_ERROR_INVALID_VALUE);
    uint64_t address;
    TRY(anonymous(bytes, RANGE_MANAGED, flags, &address));
    *out = address;
    return CUDA_SUCCESS;
}

API(cuMemHostAlloc, (void **out, size_t bytes, unsigned flags), (out, bytes, flags))
{
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    uint64_t address;
    TRY(anonymous(bytes, RANGE_HOST, flags, &address));
    *out = (void *)address;
    return CUDA_SUCCESS;
}

API(cuMemAllocHost_v2, (void **out, size_t bytes), (out, bytes)) { return cuMemHostAlloc_body(out, bytes, 0); }
API(cuMemFreeHost, (void *address), (address)) { return free_kinds((uint64_t)address, RANGE_HOST, RANGE_HOST); }

API(cuMemHostRegister_v2, (void *address, size_t bytes, unsigned flags), (address, bytes, flags))
{
    CUcontext context = context_current();
    NEED(address && bytes, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    struct range range = {.base = (uint64_t)address, .size = bytes, .span = bytes, .kind = RANGE_REGISTERED, .device = context->device, .access = 3, .flags = flags, .context = context};
    pthread_mutex_lock(&driver_lock);
    bool taken = range_find(range.base) || range_find(range.base + bytes - 1);
    CUresult rc = taken ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : range_add(range);
    pthread_mutex_unlock(&driver_lock);
    return rc;
}

API(cuMemHostUnregister, (void *address), (address))
{
    CUresult rc = free_kinds((uint64_t)address, RANGE_REGISTERED, RANGE_REGISTERED);
    return rc == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : rc;
}

static CUresult lookup(uint64_t address, struct range *out)
{
    pthread_mutex_lock(&driver_lock);
    struct range *range = range_find(address);
    if (range) *out = *range;
    pthread_mutex_unlock(&driver_lock);
    return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemHostGetDevicePointer_v2, (CUdeviceptr *out, void *address, unsigned flags), (out, address, flags))
{
    struct range range;
    NEED(out && flags == 0, CUDA_ERROR_INVALID_VALUE);
    TRY(lookup((uint64_t)address, &range));
    *out = (uint64_t)address;
    return CUDA_SUCCESS;
}

API(cuMemHostGetFlags, (unsigned *flags, void *address), (flags, address))
{
    struct range range;
    NEED(flags, CUDA_ERROR_INVALID_VALUE);
    TRY(lookup((uint64_t)address, &range));
    *flags = range.flags;
    return CUDA_SUCCESS;
}

API(cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *size, CUdeviceptr address), (base, size, address))
{
    struct range range;
    if (!base && !size) return CUDA_SUCCESS; /* measured: 0 for freed memory too */
    NEED(lookup(address, &range) == CUDA_SUCCESS, CUDA_ERROR_NOT_FOUND);
    if (base) *base = range.base;
    if (size) *size = range.size;
    return CUDA_SUCCESS;
}

/* Numbers are CUpointer_attribute. */
static CUresult pointer_attribute(void *data, int attribute, uint64_t address, const struct range *range)
{
    bool is_host = range->kind == RANGE_HOST || range->kind == RANGE_REGISTERED || (range->physical && range->physical->is_host);
    switch (attribute) {
    case 1: *(CUcontext *)data = range->context; return CUDA_SUCCESS;
    case 2: *(unsigned *)data = is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; return CUDA_SUCCESS;
    case 3: *(uint64_t *)data = address; return CUDA_SUCCESS;
    case 4:
        NEED(is_host || range->kind == RANGE_MANAGED, CUDA_ERROR_INVALID_VALUE);
        *(uint64_t *)data = address;
        return CUDA_SUCCESS;
    case 7: *(uint64_t *)data = range->buffer_id; return CUDA_SUCCESS;
    case 8: *(bool *)data = range->kind == RANGE_MANAGED; return CUDA_SUCCESS;
    case 9: *(int *)data = range->device; return CUDA_SUCCESS;
    case 11: *(uint64_t *)data = range->base; return CUDA_SUCCESS;
    case 12: *(size_t *)data = range->size; return CUDA_SUCCESS;
    case 13: *(bool *)data = true; return CUDA_SUCCESS;
    case 14: *(uint64_t *)data = range->physical ? (uint64_t)range->physical->handle_types : 0; return CUDA_SUCCESS;
    case 10: *(bool *)data = range->is_offerable; return CUDA_SUCCESS;
    case 15: *(bool *)data = false; return CUDA_SUCCESS;
    case 16: *(int *)data = range->access; return CUDA_SUCCESS;
    case 17: *(void **)data = NULL; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

API(cuPointerGetAttribute, (void *data, int attribute, CUdeviceptr address), (data, attribute, address))
{
    struct range range;
    NEED(data, CUDA_ERROR_INVALID_VALUE);
    TRY(lookup(address, &range));
    return pointer_attribute(data, attribute, address, &range);
}

/* Unlike the single call this one answers for unknown pointers too, with zeros. */
API(cuPointerGetAttributes, (unsigned count, int *attributes, void **data, CUdeviceptr address), (count, attributes, data, address))
{
    static const size_t widths[] = {0, 8, 4, 8, 8, 0, 0, 8, 1, 4, 1, 8, 8, 1, 8, 1, 4, 8};
    struct range range;
    NEED(attributes && data, CUDA_ERROR_INVALID_VALUE);
    bool known = lookup(address, &range) == CUDA_SUCCESS;
    for (unsigned n = 0; n < count; n++) {
        int attribute = attributes[n];
        NEED(data[n] && attribute > 0 && attribute <= 17 && widths[attribute], CUDA_ERROR_INVALID_VALUE);
        if (!known || pointer_attribute(data[n], attribute, address, &range) != CUDA_SUCCESS) memset(data[n], 0, widths[attribute]);
        if (!known && attribute == 9) *(int *)data[n] = -2;
    }
    return CUDA_SUCCESS;
}

/* 6 is CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, the only one that can be set; copies here are ordered as it wants anyway. */
API(cuPointerSetAttribute, (const void *value, int attribute, CUdeviceptr address), (value, attribute, address))
{
    struct range range;
    NEED(value && attribute == 6, CUDA_ERROR_INVALID_VALUE);
    return lookup(address, &range);
}

