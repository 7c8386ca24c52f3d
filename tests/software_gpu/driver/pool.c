/* Stream-ordered allocation: the address is good at once, the free happens in stream order. One default pool per device. */
#include "driver.h"

struct CUmemPoolHandle_st { int device; };
static struct CUmemPoolHandle_st default_pools[MAX_DEVICES];

static CUresult default_pool(CUmemoryPool *out, int device)
{
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    default_pools[device].device = device;
    *out = &default_pools[device];
    return CUDA_SUCCESS;
}

API(cuDeviceGetDefaultMemPool, (CUmemoryPool *out, CUdevice device), (out, device)) { return default_pool(out, device); }
API(cuDeviceGetMemPool, (CUmemoryPool *out, CUdevice device), (out, device)) { return default_pool(out, device); }

static CUresult allocate(CUdeviceptr *out, size_t bytes, CUstream handle)
{
    CUstream stream;
    uint64_t address;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    NEED(!stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    TRY(memory_allocate(stream->context, bytes, false, &address));
    *out = address;
    return CUDA_SUCCESS;
}

API(cuMemAllocAsync, (CUdeviceptr *out, size_t bytes, CUstream stream), (out, bytes, stream)) { return allocate(out, bytes, stream); }

API(cuMemAllocFromPoolAsync, (CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream), (out, bytes, pool, stream))
{
    NEED(pool, CUDA_ERROR_INVALID_VALUE);
    return allocate(out, bytes, stream);
}

API(cuMemFreeAsync, (CUdeviceptr address, CUstream handle), (address, handle))
{
    CUstream stream;
    TRY(stream_resolve(handle, &stream));
    NEED(!stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    NEED(memory_is_device(address, 1, true), CUDA_ERROR_INVALID_VALUE);
    return stream_submit(stream, (struct op){.kind = OP_FREE, .dst = address}, false);
}

/* 5 to 8 are the CUmemPool_attribute numbers of the 64-bit counters, 4 the release threshold. */
API(cuMemPoolGetAttribute, (CUmemoryPool pool, int attribute, void *value), (pool, attribute, value))
{
    NEED(pool && value && attribute >= 1 && attribute <= 8, CUDA_ERROR_INVALID_VALUE);
    if (attribute <= 3) *(int *)value = 1;
    else *(uint64_t *)value = 0;
    return CUDA_SUCCESS;
}

API(cuMemPoolSetAttribute, (CUmemoryPool pool, int attribute, void *value), (pool, attribute, value))
{
    NEED(pool && value && attribute >= 1 && attribute <= 8, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

API(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep))
{
    (void)keep; /* freed memory goes back at once: there is nothing to trim */
    NEED(pool, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}
