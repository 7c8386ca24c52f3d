/* The few names of the CUDA driver ABI that the preload uses, so that no CUDA toolkit is needed to build it. */
#ifndef VGPU_CUDA_ABI_H
#define VGPU_CUDA_ABI_H

#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t cuuint64_t;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

#define CUDA_SUCCESS 0
#define CUDA_ERROR_NO_DEVICE 100
#define CUDA_ERROR_NOT_FOUND 500

/* From this version on, the name "cuGetProcAddress" means the five-argument cuGetProcAddress_v2 (cuda.h). */
#define CUDA_VERSION_OF_PROC_ADDRESS_V2 12000

#endif
