/* Reads the few members that requests carry: integers, claims and arrays of integers of one JSON object.
 *
 * Not a general parser: values of other members are stepped over, nothing is copied. Text that is no JSON object gives
 * "absent" or "broken", never a read outside the text.
 */
#ifndef VGPU_JSON_READER_H
#define VGPU_JSON_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct json_text {
    const char *at;
    const char *end;
};

/* The value of a member of the object; false: the text is broken or has no such member. */
bool json_member(struct json_text object, const char *name, struct json_text *value);

bool json_is_null(struct json_text value);
bool json_is_true(struct json_text value);
bool json_read_integer(struct json_text *value, uint64_t *integer);

/* Steps through an array of integers: first json_enter_array, then json_next_integer until false; then `*value` is at
 * the closing bracket when all was well. */
bool json_enter_array(struct json_text *value);
bool json_next_integer(struct json_text *value, uint64_t *integer);
bool json_is_array_end(struct json_text value);

#endif
