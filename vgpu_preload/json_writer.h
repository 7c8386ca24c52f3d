/* Writes one JSON object into a buffer of the caller's. What does not fit sets `overflow` and is dropped. */
#ifndef VGPU_JSON_WRITER_H
#define VGPU_JSON_WRITER_H

#include <stdbool.h>
#include <stddef.h>

struct json_writer {
    char *start;
    char *at;
    char *end;
    bool overflow;
};

void json_raw(struct json_writer *json, const char *text);
void json_integer(struct json_writer *json, long value);

/* Quotes and escapes; bytes that are not UTF-8 become U+FFFD, because a thread name may hold any byte. */
void json_string(struct json_writer *json, const char *text);

#endif
