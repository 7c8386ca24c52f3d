/* Times launches of a kernel that does nothing, through the driver API: one process, one run, as JSON lines.
 *
 *   launch_cost --out FILE --gate FILE [--core N] [--device 0] [--bursts 200] [--burst 256] [--loops 10] [--loop 20000]
 *               [--direct OFFSET]
 *   launch_cost --tell-direct
 *
 * Writes {"ready": true}, waits until the gate file exists, pins itself to the core, warms up, and writes
 * {"result": true, "burst_ns": [...], "loop_ns": [...]}: nanoseconds a launch of each block.
 *   burst  that many launches into an idle stream that has room for all of them: what the call costs the processor
 *   loop   that many launches and the wait for the last: what a program sees whose launches come faster than the GPU takes them
 * With --direct every burst is followed or preceded by one that calls the driver's own cuLaunchKernel, past whatever stands in
 * front of it: {"result": true, "through_ns": [...], "direct_ns": [...]}, of which entries of one number lie side by side in one
 * process. OFFSET is where the function lies in the driver's library; --tell-direct, without a preload, says it.
 * Plain dlopen("libcuda.so.1"), as tests/software_gpu/programs/counter.c; the kernel is its vgpu_increment over no words, which
 * the software driver knows too. Called by bench/launch_cost.py, with and without the preload in turn. A failed call: status 2.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../tests/software_gpu/driver/kernels_ptx.h"
#include "../tests/software_gpu/driver/software_cuda.h"

#define MAX_BLOCKS 4096
#define WARM_UP_NS 300e6
#define GATE_WAIT_S 600

#define CALLS(X)                                                                                                              \
    X(cuInit, (unsigned))                                                                                                     \
    X(cuDeviceGet, (CUdevice *, int))                                                                                         \
    X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                      \
    X(cuCtxSetCurrent, (CUcontext))                                                                                           \
    X(cuModuleLoadData, (CUmodule *, const void *))                                                                           \
    X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                                            \
    X(cuStreamCreate, (CUstream *, unsigned))                                                                                 \
    X(cuStreamSynchronize, (CUstream))                                                                                        \
    X(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                                 \
    X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))

#define DECLARE(name, arguments) static CUresult(*name) arguments;
CALLS(DECLARE)

#define CHECK(call) \
    do { CUresult rc = (call); if (rc != CUDA_SUCCESS) { fprintf(stderr, "%s failed: %d\n", #call, rc); exit(2); } } while (0)

typedef CUresult (*launch_function)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);

struct options { const char *out, *gate; long core, device, bursts, burst, loops, loop, direct; };

static CUfunction function;
static CUstream stream;
static CUdeviceptr memory;

static void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) { fprintf(stderr, "%s\n", dlerror()); exit(2); }
#define LOAD(name, arguments) \
    if (!(name = (CUresult(*) arguments)dlsym(library, #name))) { fprintf(stderr, "libcuda.so.1 has no %s\n", #name); exit(2); }
    CALLS(LOAD)
}

static void open_device(long ordinal)
{
    CUcontext context;
    CUmodule module;
    CUdevice device;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, (int)ordinal));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, kernels_ptx));
    CHECK(cuModuleGetFunction(&function, module, "vgpu_increment"));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&memory, 4096));
}

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void launch_by(launch_function call, long count)
{
    unsigned long long address = memory, words = 0, delta = 1;
    void *parameters[] = {&address, &words, &delta};
    for (long n = 0; n < count; n++) CHECK(call(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

static void launch(long count)
{
    launch_by(cuLaunchKernel, count);
}

static double burst_by_ns(launch_function call, long count)
{
    double began = now_ns();
    launch_by(call, count);
    double taken = (now_ns() - began) / (double)count;
    CHECK(cuStreamSynchronize(stream));
    return taken;
}

static double burst_ns(long count)
{
    return burst_by_ns(cuLaunchKernel, count);
}

static double loop_ns(long count)
{
    double began = now_ns();
    launch(count);
    CHECK(cuStreamSynchronize(stream));
    return (now_ns() - began) / (double)count;
}

/* A fresh process pays for first touches, and its core for waking up; neither is what is asked. */
static void warm_up(const struct options *options)
{
    for (double ends = now_ns() + WARM_UP_NS; now_ns() < ends;) burst_ns(options->burst);
}

static void wait_for_gate(const char *gate)
{
    const struct timespec slice = {0, 1000000};
    for (long n = 0; n < GATE_WAIT_S * 1000L; n++) {
        if (access(gate, F_OK) == 0) return;
        nanosleep(&slice, NULL);
    }
    fprintf(stderr, "%s did not appear\n", gate);
    exit(2);
}

static void pin_to(long core)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)core, &set);
    if (core >= 0 && sched_setaffinity(0, sizeof set, &set) != 0) { perror("sched_setaffinity"); exit(2); }
}

static void write_blocks(FILE *out, const char *name, const double *taken, long count)
{
    fprintf(out, ", \"%s\": [", name);
    for (long n = 0; n < count; n++) fprintf(out, "%s%.2f", n ? ", " : "", taken[n]);
    fprintf(out, "]");
}

static void measure(const struct options *options, FILE *out)
{
    static double bursts[MAX_BLOCKS], loops[MAX_BLOCKS];
    warm_up(options);
    for (long n = 0; n < options->bursts; n++) bursts[n] = burst_ns(options->burst);
    for (long n = 0; n < options->loops; n++) loops[n] = loop_ns(options->loop);
    fprintf(out, "{\"result\": true");
    write_blocks(out, "burst_ns", bursts, options->bursts);
    write_blocks(out, "loop_ns", loops, options->loops);
    fprintf(out, "}\n");
}

static int find_driver(struct dl_phdr_info *info, size_t size, void *base)
{
    const char *name = strrchr(info->dlpi_name, '/');
    (void)size;
    if (strncmp(name ? name + 1 : info->dlpi_name, "libcuda.so", 10) != 0) return 0;
    *(uintptr_t *)base = info->dlpi_addr;
    return 1;
}

static uintptr_t driver_base(void)
{
    uintptr_t base = 0;
    dl_iterate_phdr(find_driver, &base);
    if (!base) { fprintf(stderr, "no library of the name libcuda.so is loaded\n"); exit(2); }
    return base;
}

/* In the order A B B A, so that neither way always comes first. */
static void measure_within(const struct options *options, FILE *out)
{
    static double taken[2][MAX_BLOCKS];
    launch_function ways[2] = {cuLaunchKernel, (launch_function)(driver_base() + (uintptr_t)options->direct)};
    warm_up(options);
    for (long n = 0; n < options->bursts; n++)
        for (long turn = 0; turn < 2; turn++) {
            long way = (n + turn) % 2;
            taken[way][n] = burst_by_ns(ways[way], options->burst);
        }
    fprintf(out, "{\"result\": true");
    write_blocks(out, "through_ns", taken[0], options->bursts);
    write_blocks(out, "direct_ns", taken[1], options->bursts);
    fprintf(out, "}\n");
}

static long number(const char *text, const char *name, long most)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < 0 || value > most) { fprintf(stderr, "%s: a number up to %ld, not %s\n", name, most, text); exit(1); }
    return value;
}

static struct options parse(int argc, char **argv)
{
    struct options options = {.core = -1, .bursts = 200, .burst = 256, .loops = 10, .loop = 20000};
    for (int n = 1; n < argc; n += 2) {
        const char *name = argv[n], *value = n + 1 < argc ? argv[n + 1] : "";
        if (!strcmp(name, "--out")) options.out = value;
        else if (!strcmp(name, "--gate")) options.gate = value;
        else if (!strcmp(name, "--core")) options.core = number(value, name, CPU_SETSIZE - 1);
        else if (!strcmp(name, "--device")) options.device = number(value, name, 64);
        else if (!strcmp(name, "--bursts")) options.bursts = number(value, name, MAX_BLOCKS);
        else if (!strcmp(name, "--burst")) options.burst = number(value, name, 1 << 20);
        else if (!strcmp(name, "--loops")) options.loops = number(value, name, MAX_BLOCKS);
        else if (!strcmp(name, "--loop")) options.loop = number(value, name, 1 << 30);
        else if (!strcmp(name, "--direct")) options.direct = number(value, name, LONG_MAX);
        else { fprintf(stderr, "unknown option %s\n", name); exit(1); }
    }
    if (!options.out || !options.gate || !options.burst || !options.loop) { fprintf(stderr, "--out, --gate and launches are needed\n"); exit(1); }
    return options;
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "--tell-direct")) {
        load_driver();
        printf("%lu\n", (unsigned long)((uintptr_t)cuLaunchKernel - driver_base()));
        return 0;
    }
    struct options options = parse(argc, argv);
    FILE *out = fopen(options.out, "a");
    if (!out) { perror(options.out); return 2; }
    load_driver();
    open_device(options.device);
    launch(options.burst);
    CHECK(cuStreamSynchronize(stream));
    fprintf(out, "{\"ready\": true}\n");
    fflush(out);
    wait_for_gate(options.gate);
    pin_to(options.core);
    (options.direct ? measure_within : measure)(&options, out);
    return fclose(out) == 0 ? 0 : 2;
}
