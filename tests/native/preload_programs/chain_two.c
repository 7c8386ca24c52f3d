#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

const char *whoami(void)
{
    return "two";
}

const char *next_of_two(void)
{
    const char *(*next)(void) = (const char *(*)(void))dlsym(RTLD_NEXT, "whoami");
    const char *name = next == NULL ? "nobody" : next();
    return name;
}
