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

static const struct kernel known[] = {
    {"vgpu_fill", 3, {8, 8, 8}, fill},
    {"vgpu_increment", 3, {8, 8, 8}, increment},
    {"vgpu_checksum", 3, {8, 8, 8}, checksum},
    {"vgpu_spin_ms", 1, {4}, spin_ms},
    {"vgpu_blake3_chunks", 8, {8, 4, 8, 8, 8, 8, 4, 8}, blake3_chunks},
    {"vgpu_blake3_chunks_copy", 8, {8, 4, 8, 8, 8, 8, 4, 8}, blake3_chunks_copy},
};

const struct kernel *kernel_by_name(const char *name, size_t length)
{
    for (size_t n = 0; n < sizeof known / sizeof *known; n++)
        if (strlen(known[n].name) == length && !memcmp(known[n].name, name, length)) return &known[n];
    return NULL;
}
