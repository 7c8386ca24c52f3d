#define _GNU_SOURCE
#include "descriptors.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const int wanted_numbers[] = {1000, 201};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rlimit limit_before;
static unsigned int wishes;
static bool is_raised;

const struct kept_descriptor no_descriptor = {.number = -1};

static bool raise_limit(void)
{
    if (getrlimit(RLIMIT_NOFILE, &limit_before) != 0) return false;
    struct rlimit raised = {.rlim_cur = limit_before.rlim_max, .rlim_max = limit_before.rlim_max};
    return raised.rlim_cur != limit_before.rlim_cur && setrlimit(RLIMIT_NOFILE, &raised) == 0;
}

void descriptors_allow_more(void)
{
    pthread_mutex_lock(&lock);
    if (wishes++ == 0) is_raised = raise_limit();
    pthread_mutex_unlock(&lock);
}

void descriptors_allow_as_before(void)
{
    pthread_mutex_lock(&lock);
    if (--wishes == 0 && is_raised) setrlimit(RLIMIT_NOFILE, &limit_before);
    if (wishes == 0) is_raised = false;
    pthread_mutex_unlock(&lock);
}

void descriptors_after_fork_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    if (is_raised) setrlimit(RLIMIT_NOFILE, &limit_before);
    is_raised = false;
    wishes = 0;
}

static int copy_above_the_usual(int descriptor)
{
    int copy = -1;
    for (size_t n = 0; copy < 0 && n < sizeof wanted_numbers / sizeof *wanted_numbers; n++)
        copy = fcntl(descriptor, F_DUPFD_CLOEXEC, wanted_numbers[n]);
    return copy;
}

int descriptor_move_up(int descriptor)
{
    int moved = copy_above_the_usual(descriptor);
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

void descriptor_exchange(int number, struct descriptor_identity seen, int descriptor)
{
    int flags = descriptor_is_still(number, seen) ? fcntl(number, F_GETFD) : -1;
    if (flags >= 0) dup3(descriptor, number, (flags & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0);
}

struct kept_descriptor descriptor_keep(int descriptor)
{
    if (descriptor < 0) return no_descriptor;
    return (struct kept_descriptor){.number = descriptor, .identity = descriptor_identity_of(descriptor)};
}

struct kept_descriptor descriptor_keep_copy(int descriptor)
{
    descriptors_allow_more();
    struct kept_descriptor kept = descriptor_keep(copy_above_the_usual(descriptor));
    descriptors_allow_as_before();
    return kept;
}

bool kept_copy(const struct kept_descriptor *kept, int *copy)
{
    *copy = -1;
    if (!descriptor_is_still(kept->number, kept->identity)) return false;
    *copy = fcntl(kept->number, F_DUPFD_CLOEXEC, 0);
    return *copy >= 0;
}

void kept_close(struct kept_descriptor *kept)
{
    if (descriptor_is_still(kept->number, kept->identity)) close(kept->number);
    *kept = no_descriptor;
}
