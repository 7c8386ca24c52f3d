/* Copies and memsets: checked when submitted, run in order by the stream's worker.
 *
 * As the real driver does, an asynchronous copy from pageable memory takes a snapshot before it returns, and one to pageable
 * memory returns when it is done; with pinned memory both are asynchronous.
 */
#include "driver.h"

enum side { HOST, DEVICE, ANY };

static CUresult check_side(uint64_t address, size_t bytes, enum side side, bool write)
{
    NEED(address, CUDA_ERROR_INVALID_VALUE);
    bool is_host = memory_is_pageable_host(address);
    if (side == HOST || (side == ANY && is_host)) return CUDA_SUCCESS;
    return memory_is_device(address, bytes, write) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy(uint64_t dst, enum side dst_side, uint64_t src, enum side src_side, size_t bytes, CUstream handle, bool wait)
{
    CUstream stream;
    TRY(stream_resolve(handle, &stream));
    if (bytes == 0) return CUDA_SUCCESS;
    TRY(check_side(dst, bytes, dst_side, true));
    TRY(check_side(src, bytes, src_side, false));
    struct op op = {.kind = OP_COPY, .dst = dst, .src = src, .bytes = bytes};
    if (stream->capture) return stream_submit(stream, op, false);
    if (!wait && memory_is_pageable_host(dst)) wait = true;
    if (!wait && memory_is_pageable_host(src)) {
        op.staged = malloc(bytes);
        NEED(op.staged, CUDA_ERROR_OUT_OF_MEMORY);
        memcpy(op.staged, (void *)src, bytes);
    }
    return stream_submit(stream, op, wait);
}

API(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t bytes), (dst, src, bytes)) { return copy(dst, DEVICE, (uint64_t)src, HOST, bytes, NULL, true); }
API(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t bytes), (dst, src, bytes)) { return copy((uint64_t)dst, HOST, src, DEVICE, bytes, NULL, true); }
API(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), (dst, src, bytes)) { return copy(dst, DEVICE, src, DEVICE, bytes, NULL, true); }
API(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), (dst, src, bytes)) { return copy(dst, ANY, src, ANY, bytes, NULL, true); }

API(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream), (dst, src, bytes, stream))
{
    return copy(dst, DEVICE, (uint64_t)src, HOST, bytes, stream, false);
}

API(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream), (dst, src, bytes, stream))
{
    return copy((uint64_t)dst, HOST, src, DEVICE, bytes, stream, false);
}

API(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream), (dst, src, bytes, stream))
{
    return copy(dst, DEVICE, src, DEVICE, bytes, stream, false);
}

API(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream), (dst, src, bytes, stream))
{
    return copy(dst, ANY, src, ANY, bytes, stream, false);
}

static CUresult set(uint64_t dst, size_t pitch, unsigned value, unsigned width, size_t count, size_t height, CUstream handle, bool wait)
{
    CUstream stream;
    TRY(stream_resolve(handle, &stream));
    if (count == 0 || height == 0) return CUDA_SUCCESS;
    NEED(dst % width == 0, CUDA_ERROR_INVALID_VALUE);
    for (size_t row = 0; row < height; row++) NEED(memory_is_device(dst + row * pitch, count * width, true), CUDA_ERROR_INVALID_VALUE);
    struct op op = {.kind = OP_SET, .dst = dst, .bytes = count, .pitch = pitch, .height = height, .value = value, .width = width};
    return stream_submit(stream, op, wait && !stream->capture);
}

API(cuMemsetD8_v2, (CUdeviceptr dst, unsigned char value, size_t count), (dst, value, count)) { return set(dst, 0, value, 1, count, 1, NULL, true); }
API(cuMemsetD16_v2, (CUdeviceptr dst, unsigned short value, size_t count), (dst, value, count)) { return set(dst, 0, value, 2, count, 1, NULL, true); }
API(cuMemsetD32_v2, (CUdeviceptr dst, unsigned value, size_t count), (dst, value, count)) { return set(dst, 0, value, 4, count, 1, NULL, true); }

API(cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t count, CUstream stream), (dst, value, count, stream))
{
    return set(dst, 0, value, 1, count, 1, stream, false);
}

API(cuMemsetD16Async, (CUdeviceptr dst, unsigned short value, size_t count, CUstream stream), (dst, value, count, stream))
{
    return set(dst, 0, value, 2, count, 1, stream, false);
}

API(cuMemsetD32Async, (CUdeviceptr dst, unsigned value, size_t count, CUstream stream), (dst, value, count, stream))
{
    return set(dst, 0, value, 4, count, 1, stream, false);
}

API(cuMemsetD2D8_v2, (CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height), (dst, pitch, value, width, height))
{
    return set(dst, pitch, value, 1, width, height, NULL, true);
}

API(cuMemsetD2D32_v2, (CUdeviceptr dst, size_t pitch, unsigned value, size_t width, size_t height), (dst, pitch, value, width, height))
{
    return set(dst, pitch, value, 4, width, height, NULL, true);
}
