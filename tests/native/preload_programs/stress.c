/* For the sanitizers: threads that look up, initialise and fork, while the agent pings and detaches. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "waiting.h"

typedef int v2_call(const char *symbol, void **function, int version, uint64_t flags, int *status);

static void *work(void *argument)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    for (int n = 0; n < 200; n++) {
        v2_call *ask = (v2_call *)dlsym(cuda, "cuGetProcAddress_v2");
        int (*init)(unsigned int) = NULL;
        if (ask("cuInit", (void **)&init, 12000, 0, NULL) != 0 || init(0) != 0) abort();
        if (dlsym(RTLD_DEFAULT, "nothing") != NULL || dlsym(RTLD_NEXT, "malloc") == NULL) abort();
        free(malloc(16));
    }
    return argument;
}

int main(int argc, char **argv)
{
    int forks = argc > 1 ? atoi(argv[1]) : 0;
    pthread_t threads[8];
    for (int n = 0; n < 8; n++) pthread_create(&threads[n], NULL, work, NULL);
    for (int n = 0; n < forks; n++) {
        pid_t child = fork();
        int status;
        if (child == 0) _exit(0);
        waitpid(child, &status, 0);
        if (status != 0) return 10;
    }
    for (int n = 0; n < 8; n++) pthread_join(threads[n], NULL);
    say("ready\n");
    wait_for_end();
    return 0;
}
