/* How the staged commands read what the agent sent and answer it. Used by the helper thread alone. */
#ifndef VGPU_STAGING_FRAMES_H
#define VGPU_STAGING_FRAMES_H

#include "json_reader.h"
#include "json_writer.h"
#include "objects.h"
#include "protocol.h"

/* One frame that came: what it asks and what its answer must carry. */
struct request {
    const struct frame *frame;
    struct json_text payload;
    const int *descriptors;
    size_t descriptor_count;
};

/* What went wrong, for FAILED. */
struct fault {
    const char *what; /* NULL: nothing */
    CUresult code;
    uint64_t object; /* 0: none in particular */
};

#define DESCRIPTORS_A_FRAME 200

extern const struct fault list_is_broken;

/* A writer on the one buffer for payloads; the frame is sent with its sequence. */
struct json_writer reply_begin(void);
bool reply_send(const struct request *request, enum frame_type type, const struct json_writer *json);
bool reply_send_descriptors(const struct request *request, const struct json_writer *json, const int *descriptors,
                            size_t count);
bool reply_failed(const struct request *request, const struct fault *fault);

/* Steps through "objects" of a request: all ids of the array, or all objects of the table when it is null or absent;
 * then with the memory of other processes, when the walk says so. */
struct object_walk {
    struct json_text ids;
    bool is_all;
    bool with_imports;
    unsigned int place;
};
bool walk_begin(struct object_walk *walk, const struct request *request);

/* The next id; false: that was all. Ids of objects that are gone are given too. */
bool walk_next(struct object_walk *walk, uint64_t *id);

/* False when the list broke off in the middle. */
bool walk_was_whole(const struct object_walk *walk);

#endif
