/* Finds cuInit in each way that CUDA runtimes use: argv[1] says which. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#include "waiting.h"

typedef int init_call(unsigned int flags);
typedef int v1_call(const char *symbol, void **function, int version, uint64_t flags);
typedef int v2_call(const char *symbol, void **function, int version, uint64_t flags, int *status);
typedef void *dlsym_call(void *handle, const char *name);

static init_call *by_v2(void *cuda)
{
    v2_call *ask = (v2_call *)dlsym(cuda, "cuGetProcAddress_v2"), *again = NULL;
    init_call *init = NULL;
    int status = 7;
    /* As libcudart does: the function asks for itself first. */
    if (ask("cuGetProcAddress", (void **)&again, 12000, 0, &status) != 0 || status != 0) exit(5);
    if (again("cuNoSuchCall", (void **)&init, 12000, 0, &status) != 500) exit(6);
    if (again("cuInit", (void **)&init, 2000, 0, &status) != 0) exit(7);
    return init;
}

static init_call *by_v1(void *cuda)
{
    v1_call *ask = (v1_call *)dlsym(cuda, "cuGetProcAddress"), *again = NULL;
    init_call *init = NULL;
    if (ask("cuGetProcAddress", (void **)&again, 11030, 0) != 0) exit(5);
    if (again("cuInit", (void **)&init, 2000, 0) != 0) exit(7);
    return init;
}

static init_call *by_found_dlsym(void *cuda)
{
    void *libc = dlopen(NULL, RTLD_NOW);
    dlsym_call *find = (dlsym_call *)dlsym(libc, "dlsym");
    return (init_call *)find(cuda, "cuInit");
}

#ifdef __GLIBC__
static init_call *by_dlvsym(void *cuda)
{
    dlsym_call *found = (dlsym_call *)dlvsym(dlopen("libc.so.6", RTLD_NOW), "dlsym", "GLIBC_2.2.5");
    if (found == NULL) found = dlsym;
    return (init_call *)found(cuda, "cuInit");
}
#endif

int main(int argc, char **argv)
{
    const char *way = argc > 1 ? argv[1] : "";
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | (strcmp(way, "default") == 0 ? RTLD_GLOBAL : RTLD_LOCAL));
    init_call *init = NULL;
    int (*calls)(void);
    if (cuda == NULL) return 2;
    if (strcmp(way, "dlsym") == 0) init = (init_call *)dlsym(cuda, "cuInit");
    if (strcmp(way, "default") == 0) init = (init_call *)dlsym(RTLD_DEFAULT, "cuInit");
    if (strcmp(way, "v1") == 0) init = by_v1(cuda);
    if (strcmp(way, "v2") == 0) init = by_v2(cuda);
    if (strcmp(way, "found_dlsym") == 0) init = by_found_dlsym(cuda);
#ifdef __GLIBC__
    if (strcmp(way, "dlvsym") == 0) init = by_dlvsym(cuda);
#endif
    if (init == NULL) return 8;
    if (init(0) != 0) return 3;
    calls = (int (*)(void))dlsym(cuda, "stub_init_calls");
    if (calls() != 1) return 4;
    say("ready\n");
    wait_for_end();
    return 0;
}
