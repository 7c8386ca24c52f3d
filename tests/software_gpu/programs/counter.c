/* A GPU program that notices a wrong byte: fills device memory, then counts in it with a captured graph and checks what it reads.
 *
 *   counter --out FILE [--mib 16] [--interval 100] [--step-limit N] [--device 0] [--processes 1] [--seed 1] [--check-all 8]
 *
 * Plain CUDA driver API through dlopen("libcuda.so.1"); runs on a real driver and on the software one. Each step launches one
 * graph (memset, increment and checksum of every buffer, copy of the sum), compares the sum, reads back and compares a rotating
 * eighth of every buffer, all of it each --check-all steps, and appends "step N sum S ok" to FILE, opened anew for each line.
 * A wrong word prints WRONG and ends with status 3; a failed CUDA call with 2. SIGTERM and SIGINT end it with 0.
 * --processes K forks K children before cuInit, each with its own buffers and lines prefixed "pN ".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels_ptx.h"
#include "software_cuda.h"

#define BUFFERS 4
#define SLICES 8

#define CALLS(X)                                                                                                              \
    X(cuInit, (unsigned))                                                                                                     \
    X(cuDeviceGet, (CUdevice *, int))                                                                                         \
    X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                      \
    X(cuCtxSetCurrent, (CUcontext))                                                                                           \
    X(cuModuleLoadData, (CUmodule *, const void *))                                                                           \
    X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                                            \
    X(cuStreamCreate, (CUstream *, unsigned))                                                                                 \
    X(cuStreamSynchronize, (CUstream))                                                                                        \
    X(cuStreamBeginCapture_v2, (CUstream, int))                                                                               \
    X(cuStreamEndCapture, (CUstream, CUgraph *))                                                                              \
    X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long))                                              \
    X(cuGraphDestroy, (CUgraph))                                                                                              \
    X(cuGraphExecDestroy, (CUgraphExec))                                                                                      \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                                               \
    X(cuGraphLaunch, (CUgraphExec, CUstream))                                                                                 \
    X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
    X(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                                 \
    X(cuMemAllocHost_v2, (void **, size_t))                                                                                   \
    X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                                        \
    X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                                                          \
    X(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int))                                            \
    X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                                  \
    X(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                 \
    X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))                              \
    X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                                                 \
    X(cuMemRelease, (CUmemGenericAllocationHandle))

#define DECLARE(name, arguments) static CUresult(*name) arguments;
CALLS(DECLARE)

struct options { const char *out; long mib, interval_ms, step_limit, device, processes, check_all; unsigned long long seed; };
struct buffer { CUdeviceptr address; unsigned long long words; };

static volatile sig_atomic_t is_stopping;
static char prefix[16];

static void stop(int signal)
{
    (void)signal;
    is_stopping = 1;
}

static void fail(int status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s", prefix);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    exit(status);
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

static struct buffer plain_buffer(size_t bytes)
{
    struct buffer buffer = {.words = bytes / 8};
    CHECK(cuMemAlloc_v2(&buffer.address, bytes));
    return buffer;
}

static struct buffer mapped_buffer(size_t bytes, int device)
{
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemAccessDesc access = {wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    struct buffer buffer;
    size_t granularity;
    CHECK(cuMemGetAllocationGranularity(&granularity, &wanted, 0));
    size_t span = (bytes + granularity - 1) / granularity * granularity;
    CHECK(cuMemAddressReserve(&buffer.address, span, 0, 0, 0));
    CHECK(cuMemCreate(&handle, span, &wanted, 0));
    CHECK(cuMemMap(buffer.address, span, 0, handle, 0));
    CHECK(cuMemSetAccess(buffer.address, span, &access, 1));
    CHECK(cuMemRelease(handle));
    buffer.words = bytes / 8;
    return buffer;
}

static void launch(CUfunction function, CUstream stream, unsigned long long a, unsigned long long b, unsigned long long c)
{
    void *parameters[] = {&a, &b, &c};
    CHECK(cuLaunchKernel(function, 128, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
}

static void append_line(const struct options *options, const char *line)
{
    int fd = open(options->out, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    ssize_t length = (ssize_t)strlen(line);
    if (fd < 0 || write(fd, line, (size_t)length) != length || close(fd) != 0) fail(2, "%s: %s\n", options->out, strerror(errno));
}

static unsigned long long seed_of(const struct options *options, int buffer) { return options->seed * 1000003ull + (unsigned)buffer; }

/* Compares [first, last) of a buffer that has been counted up `step` times. */
static void compare(const struct options *options, const struct buffer *buffer, int index, const unsigned long long *words,
                    unsigned long long first, unsigned long long last, unsigned long long step)
{
    for (unsigned long long n = first; n < last; n++) {
        unsigned long long wanted = kernels_fill_word(seed_of(options, index), n) + step;
        if (words[n - first] == wanted) continue;
        char line[200];
        snprintf(line, sizeof line, "%sWRONG step %llu buffer %d address %llx word %llu is %llx not %llx\n", prefix, step, index,
                 (unsigned long long)buffer->address, n, words[n - first], wanted);
        append_line(options, line);
        fail(3, "%s", line + strlen(prefix));
    }
}

static void check_part(const struct options *options, const struct buffer *buffer, int index, unsigned long long *host, CUstream stream,
                       unsigned slice, unsigned long long step)
{
    unsigned long long first = buffer->words * slice / SLICES, last = buffer->words * (slice + 1) / SLICES;
    if (first == last) return;
    CHECK(cuMemcpyDtoHAsync_v2(host, buffer->address + first * 8, (last - first) * 8, stream));
    CHECK(cuStreamSynchronize(stream));
    compare(options, buffer, index, host, first, last, step);
}

static void pause_ms(long milliseconds)
{
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (!is_stopping && nanosleep(&left, &left) != 0 && errno == EINTR) {}
}

/* Everything a counting process holds. */
struct work {
    CUdevice device;
    CUfunction fill, increment, checksum;
    CUstream stream;
    CUdeviceptr sum;
    CUgraphExec exec;
    struct buffer buffers[BUFFERS];
    unsigned long long *host, *host_sum; /* pinned */
    unsigned long long words, expected_sum;
};

static void open_device(const struct options *options, struct work *work)
{
    CUcontext context;
    CUmodule module;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&work->device, (int)options->device));
    CHECK(cuDevicePrimaryCtxRetain(&context, work->device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, kernels_ptx));
    CHECK(cuModuleGetFunction(&work->fill, module, "vgpu_fill"));
    CHECK(cuModuleGetFunction(&work->increment, module, "vgpu_increment"));
    CHECK(cuModuleGetFunction(&work->checksum, module, "vgpu_checksum"));
    CHECK(cuStreamCreate(&work->stream, CU_STREAM_NON_BLOCKING));
}

static void fill_buffers(const struct options *options, struct work *work)
{
    size_t bytes = (size_t)options->mib * (1 << 20) / BUFFERS;
    CHECK(cuMemAlloc_v2(&work->sum, 8));
    CHECK(cuMemAllocHost_v2((void **)&work->host_sum, 8));
    CHECK(cuMemAllocHost_v2((void **)&work->host, bytes / SLICES + 8));
    for (int n = 0; n < BUFFERS; n++) {
        struct buffer *buffer = &work->buffers[n];
        *buffer = n % 2 ? mapped_buffer(bytes, work->device) : plain_buffer(bytes);
        launch(work->fill, work->stream, buffer->address, buffer->words, seed_of(options, n));
        work->words += buffer->words;
        for (unsigned long long w = 0; w < buffer->words; w++) work->expected_sum += kernels_fill_word(seed_of(options, n), w);
    }
}

static void capture_step(struct work *work)
{
    CUgraph graph;
    CHECK(cuStreamBeginCapture_v2(work->stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK(cuMemsetD8Async(work->sum, 0, 8, work->stream));
    for (int n = 0; n < BUFFERS; n++) {
        launch(work->increment, work->stream, work->buffers[n].address, work->buffers[n].words, 1);
        launch(work->checksum, work->stream, work->buffers[n].address, work->buffers[n].words, work->sum);
    }
    CHECK(cuMemcpyDtoHAsync_v2(work->host_sum, work->sum, 8, work->stream));
    CHECK(cuStreamEndCapture(work->stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&work->exec, graph, 0));
    CHECK(cuGraphDestroy(graph));
}

static void run_step(const struct options *options, struct work *work, unsigned long long step)
{
    char line[120];
    CHECK(cuGraphLaunch(work->exec, work->stream));
    CHECK(cuStreamSynchronize(work->stream));
    work->expected_sum += work->words;
    int is_full = step % (unsigned long long)options->check_all == 0;
    for (int n = 0; n < BUFFERS; n++)
        for (unsigned slice = 0; slice < SLICES; slice++)
            if (is_full || slice == step % SLICES) check_part(options, &work->buffers[n], n, work->host, work->stream, slice, step);
    int is_right = *work->host_sum == work->expected_sum;
    if (is_right) snprintf(line, sizeof line, "%sstep %llu sum %llx ok\n", prefix, step, *work->host_sum);
    else snprintf(line, sizeof line, "%sWRONG step %llu sum %llx not %llx\n", prefix, step, *work->host_sum, work->expected_sum);
    append_line(options, line);
    if (!is_right) fail(3, "%s", line + strlen(prefix));
}

static int count(const struct options *options)
{
    struct work work = {0};
    unsigned long long limit = options->step_limit ? (unsigned long long)options->step_limit : ~0ull;
    open_device(options, &work);
    fill_buffers(options, &work);
    capture_step(&work);
    for (unsigned long long step = 1; !is_stopping && step <= limit; step++) {
        run_step(options, &work, step);
        pause_ms(options->interval_ms);
    }
    CHECK(cuGraphExecDestroy(work.exec));
    CHECK(cuDevicePrimaryCtxRelease_v2(work.device));
    return 0;
}

static long number(const char *text, const char *name)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < 0) fail(1, "%s needs a number, not %s\n", name, text);
    return value;
}

static struct options parse(int argc, char **argv)
{
    struct options options = {.mib = 16, .interval_ms = 100, .processes = 1, .check_all = 8, .seed = 1};
    for (int n = 1; n < argc; n += 2) {
        const char *name = argv[n], *value = n + 1 < argc ? argv[n + 1] : NULL;
        if (!value) fail(1, "%s needs a value\n", name);
        if (!strcmp(name, "--out")) options.out = value;
        else if (!strcmp(name, "--mib")) options.mib = number(value, name);
        else if (!strcmp(name, "--interval")) options.interval_ms = number(value, name);
        else if (!strcmp(name, "--step-limit")) options.step_limit = number(value, name);
        else if (!strcmp(name, "--device")) options.device = number(value, name);
        else if (!strcmp(name, "--processes")) options.processes = number(value, name);
        else if (!strcmp(name, "--check-all")) options.check_all = number(value, name);
        else if (!strcmp(name, "--seed")) options.seed = (unsigned long long)number(value, name);
        else fail(1, "unknown option %s\n", name);
    }
    if (!options.out || options.mib < 1 || options.check_all < 1 || options.processes < 1) fail(1, "--out FILE is needed, and numbers of at least 1\n");
    return options;
}

static int run_children(struct options options)
{
    pid_t children[64];
    int worst = 0, status, amount = options.processes > 64 ? 64 : (int)options.processes;
    for (int n = 0; n < amount; n++) {
        children[n] = fork();
        if (children[n] < 0) fail(2, "fork: %s\n", strerror(errno));
        if (children[n] > 0) continue;
        snprintf(prefix, sizeof prefix, "p%d ", n);
        options.seed += (unsigned)n;
        exit(count(&options));
    }
    for (int left = amount, told = 0; left > 0;) {
        if (is_stopping && !told)
            for (told = 1; told <= amount; told++) kill(children[told - 1], SIGTERM);
        if (wait(&status) < 0) continue;
        left--;
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
        if (code > worst) worst = code;
    }
    return worst;
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = stop};
    struct options options = parse(argc, argv);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    load_driver();
    return options.processes > 1 ? run_children(options) : count(&options);
}
