/* Two libraries that define the same name; RTLD_NEXT must be seen from the library that asks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

static void *(*next_malloc)(size_t);
int mallocs_seen;

/* Before the constructor of any other object and before main: malloc wrappers do this. */
__attribute__((constructor)) static void find(void)
{
    next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
}

void *malloc(size_t size)
{
    if (next_malloc == NULL) find();
    mallocs_seen++;
    return next_malloc(size);
}

const char *whoami(void)
{
    return "one";
}

const char *next_of_one(void)
{
    const char *(*next)(void) = (const char *(*)(void))dlsym(RTLD_NEXT, "whoami");
    const char *name = next == NULL ? "nobody" : next();
    return name;
}

void *dlsym_behind_one(void)
{
    void *found = dlsym(RTLD_NEXT, "dlsym");
    return found;
}
