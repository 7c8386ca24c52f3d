/* The driver's own functions that staged mode needs, found once when the process initialises CUDA.
 *
 * Called directly, past the wrappers and past other interposers: what we do with an application's memory is not a call
 * of the application.
 */
#ifndef VGPU_DRIVER_H
#define VGPU_DRIVER_H

#include <stdbool.h>

#include "cuda_abi.h"

#define DRIVER_FUNCTIONS(F) \
    F(cuCtxGetCurrent, (CUcontext *context)) \
    F(cuCtxGetDevice, (CUdevice *device)) \
    F(cuCtxSetCurrent, (CUcontext context)) \
    F(cuCtxPushCurrent_v2, (CUcontext context)) \
    F(cuCtxPopCurrent_v2, (CUcontext *context)) \
    F(cuCtxSynchronize, (void)) \
    F(cuDeviceGetAttribute, (int *value, CUdevice_attribute attribute, CUdevice device)) \
    F(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int *flags, int *active)) \
    F(cuMemAddressFree, (CUdeviceptr address, size_t size)) \
    F(cuMemAddressReserve, \
      (CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags)) \
    F(cuMemAllocPitch_v2, \
      (CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)) \
    F(cuMemCreate, \
      (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wanted, \
       unsigned long long flags)) \
    F(cuMemExportToShareableHandle, \
      (void *shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags)) \
    F(cuMemFree_v2, (CUdeviceptr address)) \
    F(cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *size, CUdeviceptr address)) \
    F(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp * found, CUmemGenericAllocationHandle handle)) \
    F(cuMemGetAllocationGranularity, (size_t * granularity, const CUmemAllocationProp *wanted, int option)) \
    F(cuMemImportFromShareableHandle, \
      (CUmemGenericAllocationHandle *handle, void *shared, CUmemAllocationHandleType type)) \
    F(cuMemMap, \
      (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, \
       unsigned long long flags)) \
    F(cuMemRelease, (CUmemGenericAllocationHandle handle)) \
    F(cuMemSetAccess, (CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t count)) \
    F(cuMemUnmap, (CUdeviceptr address, size_t size)) \
    F(cuPointerGetAttribute, (void *data, CUpointer_attribute attribute, CUdeviceptr address)) \
    F(cuPointerSetAttribute, (const void *value, CUpointer_attribute attribute, CUdeviceptr address)) \
    F(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status)) \
    F(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *mode))

struct driver {
#define DRIVER_MEMBER(name, parameters) CUresult(*name) parameters;
    DRIVER_FUNCTIONS(DRIVER_MEMBER)
#undef DRIVER_MEMBER
};

extern struct driver driver;

/* False when the driver lacks one of them: it is too old for staged mode. */
bool driver_find(const void *driver_function);

#endif
