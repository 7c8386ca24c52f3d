#define _GNU_SOURCE
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent_link.h"
#include "communicators.h"
#include "connection.h"
#include "descriptors.h"
#include "intercept.h"
#include "loaded_objects.h"
#include "loose_descriptors.h"
#include "mode.h"
#include "nccl_calls.h"
#include "nvshmem_facts.h"
#include "share_service.h"
#include "staging.h"
#include "threads.h"

/* The process that has a helper, 0 for none: a forked child finds another number than its own. */
static atomic_int helper_of_process;
static atomic_bool watches_forks;
static struct hello hello;
static sigset_t application_mask;

static void before_fork(void)
{
    connection_before_fork();
    loose_before_fork();
}

static void after_fork_in_parent(void)
{
    loose_after_fork_in_parent();
    connection_after_fork_in_parent();
}

static void forget_helper_in_child(void)
{
    loose_after_fork_in_child();
    connection_after_fork_in_child();
    descriptors_after_fork_in_child();
    share_service_after_fork_in_child();
    staging_after_fork_in_child();
    communicators_after_fork_in_child();
    nccl_calls_after_fork_in_child();
    nvshmem_after_fork_in_child();
    atomic_store(&helper_of_process, 0);
}

static void watch_forks(void)
{
    /* glibc keeps pthread_atfork in a static archive; what that calls is in libc.so.6 of every version. */
    int (*glibc_call)(void (*)(void), void (*)(void), void (*)(void), void *);
    int (*posix_call)(void (*)(void), void (*)(void), void (*)(void));
    if (atomic_exchange(&watches_forks, true)) return;
    *(void **)&glibc_call = loaded_first("__register_atfork");
    *(void **)&posix_call = loaded_first("pthread_atfork");
    if (glibc_call != NULL)
        glibc_call(before_fork, after_fork_in_parent, forget_helper_in_child, NULL);
    else if (posix_call != NULL)
        posix_call(before_fork, after_fork_in_parent, forget_helper_in_child);
}

static void *helper_main(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "vgpu-helper");
    hello.helper_tid = syscall(SYS_gettid);
    agent_link_run(&hello);
    /* The last thread: what follows is the process's own exit, with the signals as the application had them. */
    sigprocmask(SIG_SETMASK, &application_mask, NULL);
    return NULL;
}

/* The name of the process is that of its first thread; ours may be called from any. */
static void read_process_name(char name[16])
{
    prctl(PR_GET_NAME, name);
    int file = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    char line[17] = "";
    ssize_t size = read(file, line, sizeof line - 1);
    close(file);
    if (size < 1) return;
    line[strcspn(line, "\n")] = '\0';
    memcpy(name, line, 16);
    name[15] = '\0';
}

/* Staged mode needs all of it: the node's wish, a driver that is new enough, room for the tables. */
static bool start(void)
{
    device_facts_gather(&hello.facts, function_behind(CALL_cuInit));
    hello.is_staged = mode_is_staged() && staging_prepare(&hello.facts, function_behind(CALL_cuInit));
    own_build_id(hello.build_id);
    hello.libc = loaded_first("gnu_get_libc_version") != NULL ? "glibc" : "musl";
    read_process_name(hello.comm);
    hello.pid = getpid();
    watch_forks();
    if (hello.is_staged) staging_begin();
    if (thread_start(helper_main, &application_mask)) return true;
    staging_give_up();
    return false;
}

void helper_start(void)
{
    int caller_errno = errno, process = getpid(), owner = atomic_load(&helper_of_process);
    forget_known_functions();
    if (owner != process && atomic_compare_exchange_strong(&helper_of_process, &owner, process) && !start())
        atomic_store(&helper_of_process, 0);
    errno = caller_errno;
}
