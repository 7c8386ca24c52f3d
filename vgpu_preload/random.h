/* Random bytes that nobody can guess, without a file and without an allocation. */
#ifndef VGPU_RANDOM_H
#define VGPU_RANDOM_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* As a system call: the function is newer than glibc 2.17. Up to 256 bytes come whole. */
static inline bool random_bytes(unsigned char *bytes, size_t size)
{
    return syscall(SYS_getrandom, bytes, size, 0) == (ssize_t)size;
}

#endif
