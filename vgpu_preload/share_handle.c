#include "share_handle.h"

#include <string.h>

#define MAGIC "VGPUSHR1"

struct layout {
    char magic[8];
    unsigned char name[SHARE_NAME_BYTES];
    uint64_t object;
    unsigned char secret[SHARE_SECRET_BYTES];
    int32_t process;
    int32_t thread;
    uint64_t check;
};

_Static_assert(sizeof(struct layout) == sizeof(CUipcMemHandle), "a handle has 64 bytes");

/* FNV-1a: finds damage and nothing more; what keeps others out is the secret. */
static uint64_t check_of(const struct layout *layout)
{
    const unsigned char *byte = (const unsigned char *)layout;
    uint64_t sum = 0xcbf29ce484222325ULL;
    for (size_t n = 0; n < offsetof(struct layout, check); n++) sum = (sum ^ byte[n]) * 0x100000001b3ULL;
    return sum;
}

void share_handle_write(const struct share_handle *handle, CUipcMemHandle *bytes)
{
    struct layout layout = {.object = handle->object, .process = handle->process, .thread = handle->thread};
    memcpy(layout.magic, MAGIC, sizeof layout.magic);
    memcpy(layout.name, handle->name, sizeof layout.name);
    memcpy(layout.secret, handle->secret, sizeof layout.secret);
    layout.check = check_of(&layout);
    memcpy(bytes, &layout, sizeof layout);
}

bool share_handle_read(struct share_handle *handle, const CUipcMemHandle *bytes)
{
    struct layout layout;
    memcpy(&layout, bytes, sizeof layout);
    if (memcmp(layout.magic, MAGIC, sizeof layout.magic) != 0 || layout.check != check_of(&layout)) return false;
    *handle = (struct share_handle){.object = layout.object, .process = layout.process, .thread = layout.thread};
    memcpy(handle->name, layout.name, sizeof layout.name);
    memcpy(handle->secret, layout.secret, sizeof layout.secret);
    return true;
}

bool share_secret_is_same(const unsigned char *one, const unsigned char *other)
{
    unsigned char difference = 0;
    for (size_t n = 0; n < SHARE_SECRET_BYTES; n++) difference |= one[n] ^ other[n];
    return difference == 0;
}

bool share_handle_is_same(const struct share_handle *one, const struct share_handle *other)
{
    return one->object == other->object && memcmp(one->name, other->name, SHARE_NAME_BYTES) == 0 &&
           share_secret_is_same(one->secret, other->secret);
}
