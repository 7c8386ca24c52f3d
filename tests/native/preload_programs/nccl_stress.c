/* Threads that make, use, split and destroy communicators of the NCCL at argv[1], and one that watches a communicator of
 * another thread, until the standard input ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "waiting.h"

#define THREADS 4

typedef struct {
    char internal[128];
} unique_id;

extern int cuInit(unsigned int flags);
extern int cuDevicePrimaryCtxRetain(void **context, int device);
extern int cuCtxSetCurrent(void *context);

static int (*init)(void **comm, int size, unique_id id, int rank);
static int (*split)(void *comm, int color, int key, void **child, void *config);
static int (*destroy)(void *comm);
static int (*state_of)(void *comm, int *state);
static int (*all_reduce)(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream);
static atomic_bool is_over;
static _Atomic(void *) watched;

static void *watch(void *unused)
{
    int state;
    while (!atomic_load(&is_over))
        if (atomic_load(&watched) != NULL && state_of(atomic_load(&watched), &state) != 0) return "watch";
    return unused;
}

static void *work(void *number)
{
    unique_id id = {{(char)(intptr_t)number}};
    while (!atomic_load(&is_over)) {
        void *comm = NULL, *child = NULL;
        if (init(&comm, 2, id, 1) != 0 || split(comm, 1, 0, &child, NULL) != 0) return "make";
        for (int n = 0; n < 20; n++)
            if (all_reduce(NULL, NULL, 0, 0, 0, n % 2 ? comm : child, NULL) != 0) return "use";
        if (destroy(child) != 0 || destroy(comm) != 0) return "destroy";
    }
    return NULL;
}

static void *keep_one(void *unused)
{
    void *comm = NULL;
    if (init(&comm, 2, (unique_id){"kept"}, 0) != 0) return "make";
    atomic_store(&watched, comm);
    while (!atomic_load(&is_over))
        if (all_reduce(NULL, NULL, 0, 0, 0, comm, NULL) != 0) return "use";
    return unused;
}

static void find(void *library, void *function, const char *name)
{
    *(void **)function = dlsym(library, name);
    if (*(void **)function == NULL) _exit(3);
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS + 2];
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL, *context, *said;
    if (library == NULL || cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0) return 2;
    cuCtxSetCurrent(context);
    find(library, &init, "ncclCommInitRank");
    find(library, &split, "ncclCommSplit");
    find(library, &destroy, "ncclCommDestroy");
    find(library, &state_of, "ncclCommGetAsyncError");
    find(library, &all_reduce, "ncclAllReduce");
    for (intptr_t n = 0; n < THREADS; n++) pthread_create(&threads[n], NULL, work, (void *)n);
    pthread_create(&threads[THREADS], NULL, watch, NULL);
    pthread_create(&threads[THREADS + 1], NULL, keep_one, NULL);
    say("ready\n");
    wait_for_end();
    atomic_store(&is_over, true);
    for (int n = 0; n < THREADS + 2; n++) {
        pthread_join(threads[n], &said);
        if (said != NULL) return fprintf(stderr, "%s failed\n", (char *)said);
    }
    return 0;
}
