/* The kernels this driver can run: C bodies for the PTX entries of kernels_ptx.h and of gpu_state/staging/blake3.ptx. It compiles no PTX; other entries are refused. */
#include <time.h>

#include "driver.h"
#include "kernels_ptx.h"

static bool fill(const struct kernel_args *args)
{
    uint64_t *words = (uint64_t *)args->value[0];
    if (!memory_is_device(args->value[0], args->value[1] * 8, true)) return false;
    for (uint64_t n = 0; n < args->value[1]; n++) words[n] = kernels_fill_word(args->value[2], n);
    return true;
}

static bool increment(const struct kernel_args *args)
{
    uint64_t *words = (uint64_t *)args->value[0];
    if (!memory_is_device(args->value[0], args->value[1] * 8, true)) return false;
    for (uint64_t n = 0; n < args->value[1]; n++) words[n] += args->value[2];
    return true;
}

static bool checksum(const struct kernel_args *args)
{
    const uint64_t *words = (uint64_t *)args->value[0];
    uint64_t sum = 0;
    if (!memory_is_device(args->value[0], args->value[1] * 8, false) || !memory_is_device(args->value[2], 8, true)) return false;
    for (uint64_t n = 0; n < args->value[1]; n++) sum += words[n];
    __atomic_fetch_add((uint64_t *)args->value[2], sum, __ATOMIC_RELAXED);
    return true;
}

static bool spin_ms(const struct kernel_args *args)
{
    uint32_t milliseconds = (uint32_t)args->value[0];
    struct timespec left = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0) {}
    return true;
}

static bool add(const struct kernel_args *args)
{
    uint64_t *words = (uint64_t *)args->value[0];
    const uint64_t *other = (uint64_t *)args->value[2];
    if (!memory_is_device(args->value[0], args->value[1] * 8, true) || !memory_is_device(args->value[2], args->value[1] * 8, false)) return false;
    for (uint64_t n = 0; n < args->value[1]; n++) words[n] += other[n];
    return true;
}

/* Looks again ever more seldom, so that a kernel which waits takes no core. It ends with its context. */
static bool wait_word(const struct kernel_args *args)
{
    uint64_t counter, seen;
    if (!memory_load_word(args->value[1], &counter)) return false;
    for (struct timespec pause = {0, 20000}; !__atomic_load_n(&args->context->is_ending, __ATOMIC_ACQUIRE); nanosleep(&pause, NULL)) {
        if (!memory_load_word(args->value[0], &seen)) return false;
        if ((int64_t)(seen - counter - args->value[2]) >= 0) return true;
        if (pause.tv_nsec < 1000000) pause.tv_nsec += pause.tv_nsec / 4;
    }
    __atomic_store_n(&args->context->is_cut, true, __ATOMIC_RELEASE);
    return true;
}

static bool post_word(const struct kernel_args *args)
{
    uint64_t counter;
    if (!memory_load_word(args->value[1], &counter) || !memory_is_device(args->value[0], 8, true)) return false;
    __atomic_store_n((uint64_t *)args->value[0], counter + args->value[2], __ATOMIC_RELEASE);
    return true;
}

static const struct kernel known[] = {
    {"vgpu_fill", 3, {8, 8, 8}, fill},
    {"vgpu_increment", 3, {8, 8, 8}, increment},
    {"vgpu_checksum", 3, {8, 8, 8}, checksum},
    {"vgpu_spin_ms", 1, {4}, spin_ms},
    {"vgpu_add", 3, {8, 8, 8}, add},
    {"vgpu_wait_word", 3, {8, 8, 8}, wait_word},
    {"vgpu_post_word", 3, {8, 8, 8}, post_word},
    {"vgpu_blake3_chunks", 8, {8, 4, 8, 8, 8, 8, 4, 8}, blake3_chunks},
    {"vgpu_blake3_chunks_copy", 8, {8, 4, 8, 8, 8, 8, 4, 8}, blake3_chunks_copy},
};

const struct kernel *kernel_by_name(const char *name, size_t length)
{
    for (size_t n = 0; n < sizeof known / sizeof *known; n++)
        if (strlen(known[n].name) == length && !memcmp(known[n].name, name, length)) return &known[n];
    return NULL;
}
