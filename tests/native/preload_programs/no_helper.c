/* A process in which libvgpu.so cannot start a thread, while everybody else can. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    Dl_info info;
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (dladdr((void *)start, &info) != 0 && strstr(info.dli_fname, "libvgpu") != NULL) return EAGAIN;
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    return next(thread, attributes, start, argument);
}
