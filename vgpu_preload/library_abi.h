/* The part of NCCL's and NVSHMEM's ABI that the preload uses, so that neither is needed to build it.
 *
 * Names are those of nccl.h (2.9 to 2.30) and of NVSHMEM 3's host library. Enumerations are int; what is passed by
 * address stays opaque, because its layout differs between versions.
 */
#ifndef VGPU_LIBRARY_ABI_H
#define VGPU_LIBRARY_ABI_H

#include <stdint.h>

#include "cuda_abi.h"

typedef int ncclResult_t;
typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef struct ncclComm *ncclComm_t;
typedef struct ncclConfig ncclConfig_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

#define ncclSuccess 0
#define ncclSystemError 2
#define ncclInProgress 7

typedef int32_t nvshmem_team_t;
typedef struct nvshmem_team_config nvshmem_team_config_t;
typedef struct nvshmemx_init_attr nvshmemx_init_attr_t;
typedef void (*nvshmemx_device_lib_init_cb)(void **dev_state_ptr, void **transport_dev_state_ptr);

typedef struct {
    int major;
    int minor;
    int patch;
} nvshmemi_version_t;

#define NVSHMEM_TEAM_INVALID (-1)
#define NVSHMEM_STATUS_IS_INITIALIZED 2
#define NVSHMEMX_ERROR_INTERNAL 7

#endif
