/* A driver library of eight calls for the preload's own tests: says that it was called, nothing more.
 * STUB_CUINIT=<code> makes cuInit fail. Its own references to cuInit go through the global scope, as in any library
 * built without -Bsymbolic. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int init_calls;

int cuInit(unsigned int flags)
{
    const char *code = getenv("STUB_CUINIT");
    (void)flags;
    __atomic_add_fetch(&init_calls, 1, __ATOMIC_RELAXED);
    return code != NULL ? atoi(code) : 0;
}

/* Like the real driver library it brings libpthread into the process, where that is a library of its own. */
void *stub_uses_threads(void)
{
    return (void *)pthread_create;
}

int stub_init_calls(void)
{
    return init_calls;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

int cuDeviceGetCount(int *count)
{
    *count = 2;
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = 40 + ordinal;
    return 0;
}

int cuDeviceGetUuid(unsigned char uuid[16], int device)
{
    (void)device;
    memset(uuid, 0xee, 16);
    return 0;
}

int cuDeviceGetUuid_v2(unsigned char uuid[16], int device)
{
    for (int n = 0; n < 16; n++) uuid[n] = (unsigned char)(n * 16 + (device - 40));
    return 0;
}

int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags);

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    (void)flags;
    *function = NULL;
    if (strcmp(symbol, "cuInit") == 0) *function = (void *)cuInit;
    if (strcmp(symbol, "cuDeviceGetCount") == 0) *function = (void *)cuDeviceGetCount;
    if (strcmp(symbol, "cuGetProcAddress") == 0)
        *function = version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
    if (status != NULL) *status = *function == NULL;
    return *function == NULL ? 500 : 0;
}

int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
