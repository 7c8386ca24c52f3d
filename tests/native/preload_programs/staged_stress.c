/* Threads that allocate, fill, check, free, map and capture without pause, while the test takes all memory away and
 * brings it back. Ends when its standard input ends; its status says what went wrong. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../../vgpu_preload/cuda_abi.h"
#include "waiting.h"

extern CUresult cuInit(unsigned int flags);
extern CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
extern CUresult cuCtxSetCurrent(CUcontext context);
extern CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
extern CUresult cuMemFree_v2(CUdeviceptr address);
extern CUresult cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream);
extern CUresult cuMemcpyDtoHAsync_v2(void *host, CUdeviceptr address, size_t size, CUstream stream);
extern CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
extern CUresult cuStreamDestroy_v2(CUstream stream);
extern CUresult cuStreamSynchronize(CUstream stream);
extern CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
extern CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
extern CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
extern CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
extern CUresult cuGraphExecDestroy(CUgraphExec exec);
extern CUresult cuGraphDestroy(CUgraph graph);
extern CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wanted,
                            unsigned long long flags);
extern CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
extern CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags);
extern CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
extern CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags);
extern CUresult cuMemUnmap(CUdeviceptr address, size_t size);
extern CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t count);
extern CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address);

#define MIB (1ULL << 20)
#define THREADS 6
#define SLOTS 12 /* shared: one thread frees what another allocated */

static CUcontext context;
static atomic_bool is_over;
static _Atomic(CUdeviceptr) slots[SLOTS];

#define NEED(call) \
    do { \
        CUresult rc = (call); \
        if (rc != CUDA_SUCCESS) { \
            fprintf(stderr, "line %d: %d\n", __LINE__, rc); \
            exit(20); \
        } \
    } while (0)

static unsigned int random_of(unsigned int *seed)
{
    *seed = *seed * 1664525U + 1013904223U;
    return *seed >> 8;
}

/* The value of memory is its address, so that pages which came back in the wrong place are seen. */
static unsigned int value_of(CUdeviceptr address)
{
    return (unsigned int)(address >> 12) * 2654435761U;
}

static void fill(CUdeviceptr address, size_t size, CUstream stream)
{
    NEED(cuMemsetD32Async(address, value_of(address), size / 4, stream));
}

static void check(CUdeviceptr address, size_t size, CUstream stream)
{
    static _Thread_local unsigned int words[1024];
    size_t places[] = {0, size / 2, size - sizeof words};
    for (int n = 0; n < 3; n++) {
        NEED(cuMemcpyDtoHAsync_v2(words, address + places[n], sizeof words, stream));
        NEED(cuStreamSynchronize(stream));
        for (int word = 0; word < 1024; word++)
            if (words[word] != value_of(address)) {
                fprintf(stderr, "wrong word at %llx\n", address + places[n]);
                exit(21);
            }
    }
}

static void allocate_and_trade(unsigned int *seed, CUstream stream)
{
    CUdeviceptr address;
    NEED(cuMemAlloc_v2(&address, (1 + random_of(seed) % 4) * MIB));
    fill(address, 1 * MIB, stream);
    check(address, 1 * MIB, stream);
    CUdeviceptr other = atomic_exchange(&slots[random_of(seed) % SLOTS], address);
    if (other == 0) return;
    check(other, 1 * MIB, stream);
    NEED(cuMemFree_v2(other));
}

static void use_own_vmm(CUstream stream)
{
    CUmemAllocationProp wanted = {.type = 1, .location = {.type = 1, .id = 0}};
    CUmemAccessDesc access = {.location = wanted.location, .flags = 3};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    NEED(cuMemCreate(&handle, 4 * MIB, &wanted, 0));
    NEED(cuMemAddressReserve(&address, 8 * MIB, 0, 0, 0));
    NEED(cuMemMap(address, 4 * MIB, 0, handle, 0));
    NEED(cuMemSetAccess(address, 4 * MIB, &access, 1));
    NEED(cuMemMap(address + 4 * MIB, 2 * MIB, 2 * MIB, handle, 0));
    NEED(cuMemRelease(handle));
    fill(address, 4 * MIB, stream);
    check(address, 4 * MIB, stream);
    NEED(cuMemUnmap(address + 4 * MIB, 2 * MIB));
    check(address, 4 * MIB, stream);
    NEED(cuMemUnmap(address, 4 * MIB));
    NEED(cuMemAddressFree(address, 8 * MIB));
}

static void capture_and_launch(CUstream stream)
{
    CUdeviceptr address;
    CUgraph graph;
    CUgraphExec exec;
    NEED(cuMemAlloc_v2(&address, 2 * MIB));
    NEED(cuStreamBeginCapture_v2(stream, 1));
    fill(address, 2 * MIB, stream);
    NEED(cuStreamEndCapture(stream, &graph));
    NEED(cuGraphInstantiateWithFlags(&exec, graph, 0));
    NEED(cuGraphLaunch(exec, stream));
    check(address, 2 * MIB, stream);
    NEED(cuGraphExecDestroy(exec));
    NEED(cuGraphDestroy(graph));
    NEED(cuMemFree_v2(address));
}

static void ask(unsigned int *seed)
{
    CUdeviceptr address = atomic_load(&slots[random_of(seed) % SLOTS]);
    unsigned long long start = 0;
    /* It may be freed meanwhile: then this is an error of the driver's and nothing else. */
    if (address != 0) cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address);
}

static void *work(void *argument)
{
    unsigned int seed = (unsigned int)(size_t)argument * 7919U;
    CUstream stream;
    NEED(cuCtxSetCurrent(context));
    NEED(cuStreamCreate(&stream, 1));
    while (!is_over) {
        unsigned int choice = random_of(&seed) % 16;
        if (choice == 0) use_own_vmm(stream);
        if (choice == 1) capture_and_launch(stream);
        if (choice == 2) ask(&seed);
        if (choice > 2) allocate_and_trade(&seed, stream);
    }
    NEED(cuStreamDestroy_v2(stream));
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    NEED(cuInit(0));
    NEED(cuDevicePrimaryCtxRetain(&context, 0));
    for (size_t n = 0; n < THREADS; n++) pthread_create(&threads[n], NULL, work, (void *)(n + 1));
    say("ready\n");
    wait_for_end();
    is_over = true;
    for (size_t n = 0; n < THREADS; n++) pthread_join(threads[n], NULL);
    NEED(cuCtxSetCurrent(context));
    for (int n = 0; n < SLOTS; n++)
        if (slots[n] != 0) NEED(cuMemFree_v2(slots[n]));
    return 0;
}
