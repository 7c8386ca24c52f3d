#define _GNU_SOURCE
#include "app_descriptors.h"

#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "descriptors.h"

#define PLACEHOLDER_MARK 0x444c454855504756ULL /* the bytes VGPUHELD */
#define MEMFD_CLOSES_ON_EXEC 1U                /* MFD_CLOEXEC, which old headers do not have */

/* What the agent saw under a number of ours. */
struct place {
    int number;
    struct descriptor_identity seen;
};

/* The arrays of a request, which are of one length. */
struct places {
    struct json_text numbers;
    struct json_text devices;
    struct json_text inodes;
};

static bool enter(const struct request *request, const char *name, struct json_text *array)
{
    return json_member(request->payload, name, array) && json_enter_array(array);
}

static bool places_begin(const struct request *request, struct places *places)
{
    return enter(request, "numbers", &places->numbers) && enter(request, "devices", &places->devices) &&
           enter(request, "inodes", &places->inodes);
}

static bool places_next(struct places *places, struct place *place)
{
    uint64_t number, device, inode;
    if (!json_next_integer(&places->numbers, &number) || !json_next_integer(&places->devices, &device) ||
        !json_next_integer(&places->inodes, &inode))
        return false;
    place->number = number <= INT_MAX ? (int)number : -1;
    place->seen = (struct descriptor_identity){.device = (dev_t)device, .inode = (ino_t)inode};
    return true;
}

static int placeholder_make(uint64_t token)
{
    const uint64_t content[2] = {PLACEHOLDER_MARK, token};
    int descriptor = (int)syscall(SYS_memfd_create, "vgpu-placeholder", MEMFD_CLOSES_ON_EXEC);
    if (descriptor < 0 || write(descriptor, content, sizeof content) == sizeof content) return descriptor;
    close(descriptor);
    return -1;
}

/* One open file for all numbers of one token, as long as they come together. */
struct placeholder {
    uint64_t token;
    int descriptor;
};

static bool placeholder_for(struct placeholder *placeholder, uint64_t token)
{
    if (placeholder->descriptor >= 0 && placeholder->token == token) return true;
    if (placeholder->descriptor >= 0) close(placeholder->descriptor);
    *placeholder = (struct placeholder){.token = token, .descriptor = placeholder_make(token)};
    return placeholder->descriptor >= 0;
}

static struct fault put_all(struct places *places, struct json_text *tokens)
{
    struct placeholder placeholder = {.descriptor = -1};
    struct fault fault = {0};
    struct place place;
    uint64_t token;
    while (fault.what == NULL && places_next(places, &place) && json_next_integer(tokens, &token)) {
        if (!descriptor_is_still(place.number, place.seen)) continue;
        if (placeholder_for(&placeholder, token))
            descriptor_exchange(place.number, place.seen, placeholder.descriptor);
        else
            fault.what = "no file can be made that keeps a descriptor's number";
    }
    if (placeholder.descriptor >= 0) close(placeholder.descriptor);
    return fault;
}

struct fault put_placeholders(const struct request *request)
{
    struct places places;
    struct json_text tokens;
    if (!places_begin(request, &places) || !enter(request, "tokens", &tokens)) return (struct fault){0};
    descriptors_allow_more();
    struct fault fault = put_all(&places, &tokens);
    descriptors_allow_as_before();
    return fault;
}

bool take_descriptors_for_numbers(const struct request *request)
{
    struct places places;
    struct place place;
    size_t n = 0;
    if (!places_begin(request, &places)) return false;
    descriptors_allow_more();
    for (; n < request->descriptor_count && places_next(&places, &place); n++) {
        descriptor_exchange(place.number, place.seen, request->descriptors[n]);
        close(request->descriptors[n]);
    }
    for (; n < request->descriptor_count; n++) close(request->descriptors[n]);
    descriptors_allow_as_before();
    return true;
}
