#define _GNU_SOURCE
#include "descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const int wanted_numbers[] = {1000, 201};
static struct rlimit limit_before;
static bool is_raised;

void descriptors_allow_more(void)
{
    if (is_raised || getrlimit(RLIMIT_NOFILE, &limit_before) != 0) return;
    struct rlimit raised = {.rlim_cur = limit_before.rlim_max, .rlim_max = limit_before.rlim_max};
    is_raised = raised.rlim_cur != limit_before.rlim_cur && setrlimit(RLIMIT_NOFILE, &raised) == 0;
}

void descriptors_allow_as_before(void)
{
    if (is_raised) setrlimit(RLIMIT_NOFILE, &limit_before);
    is_raised = false;
}

int descriptor_move_up(int descriptor)
{
    int moved = -1;
    for (size_t n = 0; moved < 0 && n < sizeof wanted_numbers / sizeof *wanted_numbers; n++)
        moved = fcntl(descriptor, F_DUPFD_CLOEXEC, wanted_numbers[n]);
    close(descriptor);
    return moved;
}

/* As system calls: the function has another name in old glibc, in new glibc and in musl. */
struct descriptor_identity descriptor_identity_of(int descriptor)
{
    struct stat seen = {0};
    syscall(SYS_fstat, descriptor, &seen);
    return (struct descriptor_identity){.device = seen.st_dev, .inode = seen.st_ino};
}

bool descriptor_is_still(int descriptor, struct descriptor_identity identity)
{
    struct stat seen;
    return descriptor >= 0 && syscall(SYS_fstat, descriptor, &seen) == 0 && seen.st_dev == identity.device &&
           seen.st_ino == identity.inode;
}

bool descriptor_copy(int descriptor, int *copy)
{
    *copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    return *copy >= 0;
}
