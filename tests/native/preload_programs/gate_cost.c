/* Nanoseconds of one call that the driver answers at once, `count` times in each of `threads` threads. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../../../vgpu_preload/cuda_abi.h"

extern CUresult cuInit(unsigned int flags);
extern CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
extern CUresult cuCtxSetCurrent(CUcontext context);
extern CUresult cuGraphUpload(CUgraphExec exec, CUstream stream);

static long count;
static CUcontext context;

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* A call with a handle that is none: the driver refuses it at its own entry. */
static void *work(void *nanoseconds)
{
    cuCtxSetCurrent(context);
    double begin = seconds();
    for (long n = 0; n < count; n++)
        if (cuGraphUpload(NULL, NULL) != CUDA_ERROR_INVALID_VALUE) abort();
    *(double *)nanoseconds = (seconds() - begin) * 1e9 / (double)count;
    return NULL;
}

int main(int argc, char **argv)
{
    int threads = argc > 2 ? atoi(argv[2]) : 1;
    double nanoseconds[64];
    pthread_t started[64];
    count = argc > 1 ? atol(argv[1]) : 1000000;
    if (threads > 64 || cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0) return 1;
    for (int n = 0; n < threads; n++) pthread_create(&started[n], NULL, work, &nanoseconds[n]);
    for (int n = 0; n < threads; n++) {
        pthread_join(started[n], NULL);
        printf("%.2f\n", nanoseconds[n]);
    }
    return 0;
}
