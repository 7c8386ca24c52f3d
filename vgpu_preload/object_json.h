/* How an object is written into an answer: what it is, where it is mapped, who shares it. */
#ifndef VGPU_OBJECT_JSON_H
#define VGPU_OBJECT_JSON_H

#include "device_facts.h"
#include "json_writer.h"
#include "objects.h"

/* `name` brings all that stands before the value: punctuation, the name in quotes, the colon. */
void json_hex_member(struct json_writer *json, const char *name, uint64_t value);
void json_integer_member(struct json_writer *json, const char *name, uint64_t value);

/* The members of the object without the closing brace. Called with the lock held. */
void json_object_members(struct json_writer *json, const struct memory_object *object, const struct device_facts *facts);

/* Process ids that fetched it, in brackets. */
void json_peers(struct json_writer *json, const int *peers, unsigned int count);

/* Bytes of an import as far as they are mapped: the driver does not tell its size. */
uint64_t object_bytes(const struct memory_object *object);

#endif
