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
#include "connection.h"
#include "intercept.h"
#include "loaded_objects.h"

#define HELPER_STACK_BYTES (256 * 1024)

/* Before glibc 2.34 these live in libpthread. Every CUDA process has it loaded, but a DT_NEEDED here would put it into
 * every other process of the container too; so they are found when they are needed. */
struct thread_calls {
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    int (*attr_init)(pthread_attr_t *);
    int (*attr_destroy)(pthread_attr_t *);
    int (*attr_setstacksize)(pthread_attr_t *, size_t);
    int (*attr_setdetachstate)(pthread_attr_t *, int);
};

/* The process that has a helper, 0 for none: a forked child finds another number than its own. */
static atomic_int helper_of_process;
static atomic_bool watches_forks;
static struct hello hello;
static sigset_t application_mask;

static void forget_helper_in_child(void)
{
    connection_after_fork_in_child();
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
        glibc_call(connection_before_fork, connection_after_fork_in_parent, forget_helper_in_child, NULL);
    else if (posix_call != NULL)
        posix_call(connection_before_fork, connection_after_fork_in_parent, forget_helper_in_child);
}

static bool find_thread_calls(struct thread_calls *calls)
{
    *(void **)&calls->create = loaded_first("pthread_create");
    *(void **)&calls->attr_init = loaded_first("pthread_attr_init");
    *(void **)&calls->attr_destroy = loaded_first("pthread_attr_destroy");
    *(void **)&calls->attr_setstacksize = loaded_first("pthread_attr_setstacksize");
    *(void **)&calls->attr_setdetachstate = loaded_first("pthread_attr_setdetachstate");
    return calls->create && calls->attr_init && calls->attr_destroy && calls->attr_setstacksize &&
           calls->attr_setdetachstate;
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

static bool create_thread(const struct thread_calls *calls)
{
    pthread_t thread;
    pthread_attr_t attributes;
    if (calls->attr_init(&attributes) != 0) return false;
    calls->attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    calls->attr_setstacksize(&attributes, HELPER_STACK_BYTES);
    int error = calls->create(&thread, &attributes, helper_main, NULL);
    if (error == EINVAL) {
        /* glibc takes the static TLS of all libraries out of the stack; where that is more, take what it takes. */
        calls->attr_destroy(&attributes);
        calls->attr_init(&attributes);
        calls->attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        error = calls->create(&thread, &attributes, helper_main, NULL);
    }
    calls->attr_destroy(&attributes);
    return error == 0;
}

/* A new thread inherits the mask. libc keeps its own internal signals out of it, so setuid() still reaches us. */
static bool create_thread_without_signals(const struct thread_calls *calls)
{
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &application_mask);
    bool created = create_thread(calls);
    sigprocmask(SIG_SETMASK, &application_mask, NULL);
    return created;
}

static bool start(void)
{
    struct thread_calls calls;
    if (!find_thread_calls(&calls)) return false;
    device_facts_gather(&hello.facts, function_behind(CALL_cuInit));
    own_build_id(hello.build_id);
    hello.libc = loaded_first("gnu_get_libc_version") != NULL ? "glibc" : "musl";
    read_process_name(hello.comm);
    hello.pid = getpid();
    watch_forks();
    return create_thread_without_signals(&calls);
}

void helper_start(void)
{
    int caller_errno = errno, process = getpid(), owner = atomic_load(&helper_of_process);
    if (owner != process && atomic_compare_exchange_strong(&helper_of_process, &owner, process) && !start())
        atomic_store(&helper_of_process, 0);
    errno = caller_errno;
}
