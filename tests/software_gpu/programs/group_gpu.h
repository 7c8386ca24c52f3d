/* What every process of `ring` needs of a GPU: the driver by dlopen, a context with the test kernels, buffers, lines of output.
 *
 * Plain CUDA driver API: the same source runs on a real driver and on the software one. A failed call ends the process with
 * status 2, a wrong word with 3. Included by the other group_*.h files.
 */
#ifndef GROUP_GPU_H
#define GROUP_GPU_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels_ptx.h"
#include "software_cuda.h"

#define MOST_RANKS 8
#define MIB (1ull << 20)
#define GROUP_GRANULARITY (2 * MIB)
#define LAZY_ENABLE_PEER_ACCESS 1

typedef unsigned long long word;
struct ipc_handle { char reserved[64]; };

#define CALLS(X)                                                                                                              \
    X(cuInit, (unsigned))                                                                                                     \
    X(cuDeviceGet, (CUdevice *, int))                                                                                         \
    X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                      \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                                               \
    X(cuCtxSetCurrent, (CUcontext))                                                                                           \
    X(cuModuleLoadData, (CUmodule *, const void *))                                                                           \
    X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                                            \
    X(cuStreamCreate, (CUstream *, unsigned))                                                                                 \
    X(cuStreamSynchronize, (CUstream))                                                                                        \
    X(cuStreamBeginCapture_v2, (CUstream, int))                                                                               \
    X(cuStreamEndCapture, (CUstream, CUgraph *))                                                                              \
    X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, word))                                                            \
    X(cuGraphDestroy, (CUgraph))                                                                                              \
    X(cuGraphLaunch, (CUgraphExec, CUstream))                                                                                 \
    X(cuEventCreate, (CUevent *, unsigned))                                                                                   \
    X(cuEventRecord, (CUevent, CUstream))                                                                                     \
    X(cuEventSynchronize, (CUevent))                                                                                          \
    X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
    X(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                                 \
    X(cuMemFree_v2, (CUdeviceptr))                                                                                            \
    X(cuMemAllocHost_v2, (void **, size_t))                                                                                   \
    X(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t))                                                                   \
    X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                                                          \
    X(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                                     \
    X(cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t))                                                                    \
    X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, word))                                                \
    X(cuMemAddressFree, (CUdeviceptr, size_t))                                                                                \
    X(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, word))                               \
    X(cuMemRelease, (CUmemGenericAllocationHandle))                                                                           \
    X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, word))                                            \
    X(cuMemUnmap, (CUdeviceptr, size_t))                                                                                      \
    X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                                                 \
    X(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *, void *))                                                  \
    X(cuMemExportToShareableHandle, (void *, CUmemGenericAllocationHandle, int, word))                                        \
    X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *, void *, int))                                          \
    X(cuIpcGetMemHandle, (struct ipc_handle *, CUdeviceptr))                                                                  \
    X(cuIpcOpenMemHandle_v2, (CUdeviceptr *, struct ipc_handle, unsigned))                                                    \
    X(cuIpcCloseMemHandle, (CUdeviceptr))

#define DECLARE(name, arguments) static CUresult(*name) arguments;
CALLS(DECLARE)

struct options {
    const char *out, *mode, *share;
    long ranks, devices, mib, interval_ms, step_limit, ahead, epoch, check_all, beat_ms, stall_rank, stall_step, fork_server, keep_going, hold, send_late_ms, take_late_ms;
    word seed;
};

/* One process of the group. */
struct rank {
    const struct options *options;
    int number;
    CUdevice device;
    CUcontext context;
    CUfunction fill, increment, checksum, add, wait, post;
    CUstream stream;
    CUdeviceptr steps; /* a word on the device that counts steps: captured graphs read it */
    word *host;        /* pinned, for reading back */
};

static char prefix[32];

static void fail(int status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s", prefix);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    _exit(status);
}

#define CHECK(call) \
    do { CUresult rc = (call); if (rc != CUDA_SUCCESS) fail(2, "%s failed: %d\n", #call, rc); } while (0)

static void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) fail(2, "%s\n", dlerror());
#define LOAD(name, arguments) if (!(name = (CUresult(*) arguments)dlsym(library, #name))) fail(2, "libcuda.so.1 has no %s\n", #name);
    CALLS(LOAD)
}

static void append_to(const char *path, const char *line)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    ssize_t length = (ssize_t)strlen(line);
    if (fd < 0 || write(fd, line, (size_t)length) != length || close(fd) != 0) fail(2, "%s: %s\n", path, strerror(errno));
}

static void pause_ms(long milliseconds)
{
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
}

static CUfunction kernel(CUmodule module, const char *name)
{
    CUfunction function;
    CHECK(cuModuleGetFunction(&function, module, name));
    return function;
}

/* --beat: work in a second stream beside that of the mode, whatever the mode waits for. */
static void *beat(void *argument);

static void start_beat(const struct rank *rank)
{
    struct rank *own = malloc(sizeof *own);
    pthread_t thread;
    *own = *rank;
    if (pthread_create(&thread, NULL, beat, own) != 0) fail(2, "no thread\n");
    pthread_detach(thread);
}

static struct rank rank_open(const struct options *options, int number)
{
    struct rank rank = {.options = options, .number = number};
    CUmodule module;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&rank.device, number % (int)options->devices));
    CHECK(cuDevicePrimaryCtxRetain(&rank.context, rank.device));
    CHECK(cuCtxSetCurrent(rank.context));
    CHECK(cuModuleLoadData(&module, kernels_ptx));
    rank.fill = kernel(module, "vgpu_fill");
    rank.increment = kernel(module, "vgpu_increment");
    rank.checksum = kernel(module, "vgpu_checksum");
    rank.add = kernel(module, "vgpu_add");
    rank.wait = kernel(module, "vgpu_wait_word");
    rank.post = kernel(module, "vgpu_post_word");
    CHECK(cuStreamCreate(&rank.stream, CU_STREAM_NON_BLOCKING));
    if (options->beat_ms) start_beat(&rank);
    return rank;
}

static void launch(CUfunction function, CUstream stream, word a, word b, word c)
{
    void *parameters[] = {&a, &b, &c};
    CHECK(cuLaunchKernel(function, 32, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
}

static void launch_one(CUfunction function, CUstream stream, CUdeviceptr flag, CUdeviceptr counter, word more)
{
    void *parameters[] = {&flag, &counter, &more};
    CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr address;
    CHECK(cuMemAlloc_v2(&address, bytes));
    CHECK(cuMemsetD8_v2(address, 0, bytes));
    return address;
}

static word *allocate_host(size_t bytes)
{
    void *memory;
    CHECK(cuMemAllocHost_v2(&memory, bytes));
    memset(memory, 0, bytes);
    return memory;
}

static void write_word(CUdeviceptr address, word value) { CHECK(cuMemcpyHtoD_v2(address, &value, sizeof value)); }

static word seed_of(const struct rank *rank, int number) { return rank->options->seed * 1000003ull + (word)number; }
static word fill_of(const struct rank *rank, int number, word index) { return kernels_fill_word(seed_of(rank, number), index); }

/* Content that must be, by index; `more` is the same for all words. */
struct expected { const word *base; word more; };

static void report_wrong(const struct rank *rank, word step, const char *what, word place, word found, word wanted)
{
    char line[200];
    snprintf(line, sizeof line, "rank %d WRONG step %llu %s word %llu is %llx not %llx\n", rank->number, step, what, place, found, wanted);
    append_to(rank->options->out, line);
    fail(3, "%s", line);
}

/* Reads [first, last) back through the stream, with what was launched before, and compares. */
static void compare(const struct rank *rank, CUstream stream, CUdeviceptr from, struct expected expected, word first, word last, word step)
{
    CHECK(cuMemcpyDtoHAsync_v2(rank->host, from + first * 8, (last - first) * 8, stream));
    CHECK(cuStreamSynchronize(stream));
    for (word n = first; n < last; n++)
        if (rank->host[n - first] != expected.base[n] + expected.more)
            report_wrong(rank, step, "content", n, rank->host[n - first], expected.base[n] + expected.more);
}

static void compare_sum(const struct rank *rank, word step, word found, word wanted)
{
    if (found != wanted) report_wrong(rank, step, "sum", 0, found, wanted);
}

static void write_step(const struct rank *rank, word step, word sum)
{
    char line[120];
    snprintf(line, sizeof line, "rank %d step %llu sum %llx ok\n", rank->number, step, sum);
    append_to(rank->options->out, line);
}

static word sum_of(const word *base, word words)
{
    word sum = 0;
    for (word n = 0; n < words; n++) sum += base[n];
    return sum;
}

/* --stall-rank, --stall-step: the rank does not come until OUT.go is there. */
static void stall(const struct rank *rank, word step)
{
    char path[600];
    if (rank->options->stall_rank != rank->number || (word)rank->options->stall_step != step) return;
    snprintf(path, sizeof path, "%s.go", rank->options->out);
    while (access(path, F_OK) != 0) pause_ms(10);
}

/* --send-late, --take-late: what the rank is about to do, for whoever wants to come in between. */
static void come_late(const struct rank *rank, const char *after, long milliseconds)
{
    char path[600], line[80];
    if (!milliseconds) return;
    snprintf(path, sizeof path, "%s.late", rank->options->out);
    snprintf(line, sizeof line, "rank %d %s\n", rank->number, after);
    append_to(path, line);
    pause_ms(milliseconds);
}

/* Between 0 and twice --interval, another time for each rank and step. */
static void take_its_time(const struct rank *rank, word step)
{
    long most = 2 * rank->options->interval_ms + 1;
    pause_ms((long)(kernels_fill_word((word)rank->number, step) % (word)most));
}

#endif
