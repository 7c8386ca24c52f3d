#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <pthread.h>

#include "loaded_objects.h"

#define STACK_BYTES (256 * 1024)

/* Before glibc 2.34 these live in libpthread. Every CUDA process has it loaded, but a DT_NEEDED here would put it into
 * every other process of the container too; so they are found when they are needed. */
struct thread_calls {
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    int (*attr_init)(pthread_attr_t *);
    int (*attr_destroy)(pthread_attr_t *);
    int (*attr_setstacksize)(pthread_attr_t *, size_t);
    int (*attr_setdetachstate)(pthread_attr_t *, int);
};

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

static bool create_thread(const struct thread_calls *calls, void *(*main)(void *))
{
    pthread_t thread;
    pthread_attr_t attributes;
    if (calls->attr_init(&attributes) != 0) return false;
    calls->attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    calls->attr_setstacksize(&attributes, STACK_BYTES);
    int error = calls->create(&thread, &attributes, main, NULL);
    if (error == EINVAL) {
        /* glibc takes the static TLS of all libraries out of the stack; where that is more, take what it takes. */
        calls->attr_destroy(&attributes);
        calls->attr_init(&attributes);
        calls->attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        error = calls->create(&thread, &attributes, main, NULL);
    }
    calls->attr_destroy(&attributes);
    return error == 0;
}

/* A new thread inherits the mask. libc keeps its own internal signals out of it, so setuid() still reaches it. */
bool thread_start(void *(*main)(void *), sigset_t *application_mask)
{
    struct thread_calls calls;
    sigset_t all, before;
    if (!find_thread_calls(&calls)) return false;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    if (application_mask != NULL) *application_mask = before;
    bool created = create_thread(&calls, main);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return created;
}
