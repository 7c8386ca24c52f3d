#define _GNU_SOURCE
#include "staging_frames.h"

#include <sys/mman.h>

#include "connection.h"

#define SEND_DEADLINE_MS 10000 /* 8 MiB to an agent that has other containers to serve */

const struct fault list_is_broken = {.what = "the list of objects is broken"};

/* Most of it is never touched; what was is given back after each frame, so that no image carries it. */
static char *buffer;

struct json_writer reply_begin(void)
{
    if (buffer == NULL) {
        void *memory = mmap(NULL, FRAME_MOST_PAYLOAD_STAGED, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        buffer = memory == MAP_FAILED ? NULL : memory;
    }
    size_t size = buffer != NULL ? FRAME_MOST_PAYLOAD_STAGED : 0;
    return (struct json_writer){.start = buffer, .at = buffer, .end = buffer + size};
}

static bool send_payload(const struct request *request, enum frame_type type, const struct json_writer *json,
                         const int *descriptors, size_t count)
{
    unsigned char header[FRAME_HEADER_SIZE];
    size_t size = (size_t)(json->at - json->start);
    struct frame frame = {
        .version = 2, .type = (uint16_t)type, .payload_size = (uint32_t)size, .sequence = request->frame->sequence};
    frame_write(header, &frame);
    bool sent = connection_send_with(header, sizeof header, descriptors, count, SEND_DEADLINE_MS) &&
                connection_send(json->start, size, SEND_DEADLINE_MS);
    if (size > 65536) madvise(buffer, FRAME_MOST_PAYLOAD_STAGED, MADV_DONTNEED);
    return sent;
}

bool reply_send(const struct request *request, enum frame_type type, const struct json_writer *json)
{
    if (json->overflow) return reply_failed(request, &(struct fault){.what = "the answer passes 8 MiB"});
    return send_payload(request, type, json, NULL, 0);
}

bool reply_send_descriptors(const struct request *request, const struct json_writer *json, const int *descriptors,
                            size_t count)
{
    return send_payload(request, FRAME_FDS, json, descriptors, count);
}

bool reply_failed(const struct request *request, const struct fault *fault)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"what\":");
    json_string(&json, fault->what);
    json_raw(&json, ",\"code\":");
    json_integer(&json, fault->code);
    if (fault->object != 0) {
        json_raw(&json, ",\"object\":");
        json_integer(&json, (long)fault->object);
    }
    json_raw(&json, "}");
    return send_payload(request, FRAME_FAILED, &json, NULL, 0);
}

bool walk_begin(struct object_walk *walk, const struct request *request)
{
    *walk = (struct object_walk){.is_all = true};
    if (!json_member(request->payload, "objects", &walk->ids) || json_is_null(walk->ids)) return true;
    walk->is_all = false;
    return json_enter_array(&walk->ids);
}

static bool next_of_table(struct object_walk *walk, uint64_t *id)
{
    bool found = false;
    objects_lock();
    for (; !found && walk->place < objects_end(); walk->place++) {
        struct memory_object *object = object_at_place(walk->place);
        found = object != NULL && (object_is_own(object) || (walk->with_imports && object_is_import(object))) && !object->is_dead;
        if (found) *id = object->id;
    }
    objects_unlock();
    return found;
}

bool walk_next(struct object_walk *walk, uint64_t *id)
{
    return walk->is_all ? next_of_table(walk, id) : json_next_integer(&walk->ids, id);
}

bool walk_was_whole(const struct object_walk *walk)
{
    return walk->is_all || json_is_array_end(walk->ids);
}
