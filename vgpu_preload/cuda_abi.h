/* The part of the CUDA driver ABI that the preload uses, so that no CUDA toolkit is needed to build it.
 *
 * Names are those of cuda.h. Enumerations are int, handles and structures behind pointers stay opaque. Sizes and
 * offsets of what is not opaque are compared with cuda.h by tests/native/test_preload_staged.py.
 */
#ifndef VGPU_CUDA_ABI_H
#define VGPU_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef unsigned long long CUtexObject;
typedef unsigned long long CUsurfObject;

#define HANDLE(name) typedef struct name##_opaque *name
HANDLE(CUarray);
HANDLE(CUcontext);
HANDLE(CUdevResourceDesc);
HANDLE(CUevent);
HANDLE(CUexternalMemory);
HANDLE(CUexternalSemaphore);
HANDLE(CUfunction);
HANDLE(CUgraph);
HANDLE(CUgraphExec);
HANDLE(CUgraphNode);
HANDLE(CUgraphicsResource);
HANDLE(CUgreenCtx);
HANDLE(CUkernel);
HANDLE(CUlibrary);
HANDLE(CUlinkState);
HANDLE(CUmemoryPool);
HANDLE(CUmipmappedArray);
HANDLE(CUmodule);
HANDLE(CUstream);
#undef HANDLE

typedef int CUdriverProcAddressQueryResult;
typedef int CUgraphExecUpdateResult;
typedef int CUjit_option;
typedef int CUlibraryOption;
typedef int CUlimit;
typedef int CUmemAllocationHandleType;
typedef int CUmemAllocationType;
typedef int CUmemRangeHandleType;
typedef int CUmem_advise;
typedef int CUpointer_attribute;
typedef int CUstreamCaptureMode;
typedef int CUstreamCaptureStatus;
typedef int CUdevice_attribute;

#define OPAQUE(name) typedef struct name name
OPAQUE(CUDA_BATCH_MEM_OP_NODE_PARAMS);
OPAQUE(CUDA_EXTERNAL_MEMORY_BUFFER_DESC);
OPAQUE(CUDA_EXTERNAL_MEMORY_HANDLE_DESC);
OPAQUE(CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC);
OPAQUE(CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS);
OPAQUE(CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS);
OPAQUE(CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
OPAQUE(CUDA_EXT_SEM_WAIT_NODE_PARAMS);
OPAQUE(CUDA_GRAPH_INSTANTIATE_PARAMS);
OPAQUE(CUDA_HOST_NODE_PARAMS);
OPAQUE(CUDA_KERNEL_NODE_PARAMS);
OPAQUE(CUDA_KERNEL_NODE_PARAMS_v1);
OPAQUE(CUDA_LAUNCH_PARAMS);
OPAQUE(CUDA_MEMCPY2D);
OPAQUE(CUDA_MEMCPY3D);
OPAQUE(CUDA_MEMCPY3D_BATCH_OP);
OPAQUE(CUDA_MEMCPY3D_PEER);
OPAQUE(CUDA_MEMSET_NODE_PARAMS);
OPAQUE(CUDA_MEM_ALLOC_NODE_PARAMS);
OPAQUE(CUDA_RESOURCE_DESC);
OPAQUE(CUDA_RESOURCE_VIEW_DESC);
OPAQUE(CUDA_TEXTURE_DESC);
OPAQUE(CUctxCreateParams);
OPAQUE(CUexecAffinityParam);
OPAQUE(CUgraphEdgeData);
OPAQUE(CUgraphExecUpdateResultInfo);
OPAQUE(CUgraphNodeParams);
OPAQUE(CUlaunchConfig);
OPAQUE(CUmemDecompressParams);
OPAQUE(CUmemPoolProps);
OPAQUE(CUmemPoolPtrExportData);
OPAQUE(CUmemcpyAttributes);
OPAQUE(CUstreamBatchMemOpParams);
#undef OPAQUE

typedef void (*CUhostFn)(void *userData);
typedef void (*CUstreamCallback)(CUstream hStream, CUresult status, void *userData);

typedef struct {
    unsigned char bytes[16];
} CUuuid;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

typedef struct {
    char reserved[64];
} CUipcEventHandle;

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    unsigned int numDevices;
    size_t size;
    unsigned long long handleTypes;
    unsigned long long flags;
} CUmulticastObjectProp;

typedef struct {
    size_t Width;
    size_t Height;
    int Format;
    unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
    size_t Width;
    size_t Height;
    size_t Depth;
    int Format;
    unsigned int NumChannels;
    unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

typedef struct {
    int resourceType;
    CUarray resource;
    int subresourceType;
    unsigned int subresource[8] __attribute__((aligned(8)));
    int memOperationType;
    int memHandleType;
    CUmemGenericAllocationHandle memHandle;
    unsigned long long offset;
    unsigned int deviceBitMask;
    unsigned int flags;
    unsigned int reserved[2];
} CUarrayMapInfo;

#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_OUT_OF_MEMORY 2
#define CUDA_ERROR_NOT_INITIALIZED 3
#define CUDA_ERROR_NO_DEVICE 100
#define CUDA_ERROR_INVALID_CONTEXT 201
#define CUDA_ERROR_MAP_FAILED 205
#define CUDA_ERROR_INVALID_HANDLE 400
#define CUDA_ERROR_ILLEGAL_STATE 401
#define CUDA_ERROR_NOT_FOUND 500

#define CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM 2
#define CU_MEM_ALLOCATION_TYPE_PINNED 1
#define CU_MEM_LOCATION_TYPE_DEVICE 1
#define CU_MEM_LOCATION_TYPE_HOST 2
#define CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT 4 /* HOST_NUMA lies between */
#define CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR 1
#define CU_MEM_HANDLE_TYPE_FABRIC 8
#define CU_MEM_ACCESS_FLAGS_PROT_READWRITE 3
#define CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS 1
#define CU_STREAM_CAPTURE_MODE_RELAXED 2
#define CU_STREAM_CAPTURE_STATUS_NONE 0
#define CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED 110
#define CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED 103

#define CU_POINTER_ATTRIBUTE_CONTEXT 1
#define CU_POINTER_ATTRIBUTE_MEMORY_TYPE 2
#define CU_POINTER_ATTRIBUTE_DEVICE_POINTER 3
#define CU_POINTER_ATTRIBUTE_HOST_POINTER 4
#define CU_POINTER_ATTRIBUTE_SYNC_MEMOPS 6
#define CU_POINTER_ATTRIBUTE_BUFFER_ID 7
#define CU_POINTER_ATTRIBUTE_IS_MANAGED 8
#define CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL 9
#define CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE 10
#define CU_POINTER_ATTRIBUTE_RANGE_START_ADDR 11
#define CU_POINTER_ATTRIBUTE_RANGE_SIZE 12
#define CU_POINTER_ATTRIBUTE_MAPPED 13
#define CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES 14
#define CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE 17
#define CU_POINTER_ATTRIBUTE_MAPPING_SIZE 18
#define CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR 19

/* From this version on, the name "cuGetProcAddress" means the five-argument cuGetProcAddress_v2 (cuda.h). */
#define CUDA_VERSION_OF_PROC_ADDRESS_V2 12000

#endif
