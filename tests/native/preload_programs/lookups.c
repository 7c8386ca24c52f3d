/* Prints what lookups give, to be compared with and without the preload. No CUDA library is loaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

extern int mallocs_seen;
extern const char *whoami(void);
extern const char *next_of_one(void);
extern const char *next_of_two(void);
extern void *dlsym_behind_one(void);

static void look(const char *what, void *handle, const char *name)
{
    dlerror();
    void *found = dlsym(handle, name);
    printf("%s %s: %s, error %s\n", what, name, found != NULL ? "found" : "absent", dlerror() != NULL ? "yes" : "no");
}

int main(void)
{
    static const char *const names[] = {"cuInit", "cuGetProcAddress", "cuGetProcAddress_v2", "dlsym", "malloc", "nothing",
                                        "ncclAllReduce", "nvshmem_team_destroy"};
    void *program = dlopen(NULL, RTLD_NOW), *two = dlopen("libchain_two.so", RTLD_NOW);
    const char *(*next)(void) = (const char *(*)(void))dlsym(RTLD_NEXT, "whoami");
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        look("default", RTLD_DEFAULT, names[n]);
        look("next", RTLD_NEXT, names[n]);
        look("program", program, names[n]);
        look("library", two, names[n]);
    }
    printf("%s, next of main %s, of one %s, of two %s\n", whoami(), next(), next_of_one(), next_of_two());
    printf("dlsym behind one %s\n", dlsym_behind_one() != NULL ? "found" : "absent");
    void *volatile memory = malloc(10);
    free(memory);
    printf("malloc wrapped %s\n", mallocs_seen > 0 ? "yes" : "no");
    return 0;
}
