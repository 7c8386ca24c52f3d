#include "object_json.h"

#include "protocol.h"

void json_hex_member(struct json_writer *json, const char *name, uint64_t value)
{
    static const char digits[] = "0123456789abcdef";
    char text[19] = "0x";
    int count = 1;
    while (count < 16 && value >> (4 * count) != 0) count++;
    for (int n = 0; n < count; n++) text[2 + n] = digits[value >> (4 * (count - 1 - n)) & 0xf];
    text[2 + count] = '\0';
    json_raw(json, name);
    json_string(json, text);
}

void json_integer_member(struct json_writer *json, const char *name, uint64_t value)
{
    json_raw(json, name);
    json_integer(json, (long)value);
}

static void write_access(struct json_writer *json, const struct memory_mapping *mapping)
{
    bool is_first = true;
    for (int device = 0; device < MOST_DEVICES; device++) {
        if (mapping->access[device] == 0) continue;
        json_integer_member(json, is_first ? "[" : ",[", (uint64_t)device);
        json_integer_member(json, ",", mapping->access[device]);
        json_raw(json, "]");
        is_first = false;
    }
}

static void write_mappings(struct json_writer *json, const struct memory_object *object)
{
    for (const struct memory_mapping *mapping = object->first_mapping; mapping != NULL; mapping = mapping->next) {
        json_hex_member(json, mapping == object->first_mapping ? "{\"va\":" : ",{\"va\":", mapping->address);
        json_integer_member(json, ",\"size\":", mapping->size);
        json_integer_member(json, ",\"offset\":", mapping->offset);
        json_raw(json, ",\"access\":[");
        write_access(json, mapping);
        json_raw(json, "]}");
    }
}

static void write_uuid(struct json_writer *json, const struct device_facts *facts, int ordinal)
{
    char uuid[41] = "";
    for (int n = 0; n < facts->device_count; n++)
        if (facts->devices[n].ordinal == ordinal) uuid_text(&facts->devices[n].uuid, uuid);
    json_string(json, uuid);
}

void json_peers(struct json_writer *json, const int *peers, unsigned int count)
{
    json_raw(json, "[");
    for (unsigned int n = 0; n < count && n < MOST_PEERS; n++)
        json_integer_member(json, n == 0 ? "" : ",", (uint64_t)peers[n]);
    json_raw(json, "]");
}

static void write_shared(struct json_writer *json, const struct memory_object *object)
{
    static const char *const names[] = {"descriptor", "handle", "fabric"};
    bool is_first = true;
    json_raw(json, ",\"shared\":{\"ways\":[");
    for (unsigned int n = 0; n < sizeof names / sizeof *names; n++) {
        if ((object->ways_out & 1U << n) == 0) continue;
        if (!is_first) json_raw(json, ",");
        json_string(json, names[n]);
        is_first = false;
    }
    json_raw(json, "],\"peers\":");
    json_peers(json, object->peers, object->peer_count);
    json_integer_member(json, ",\"peer_count\":", object->peer_count);
    json_raw(json, "}");
}

static void write_exporter(struct json_writer *json, const struct share_handle *handle)
{
    json_integer_member(json, ",\"exporter\":{\"process\":", (uint64_t)handle->process);
    json_integer_member(json, ",\"object\":", handle->object);
    json_raw(json, "}");
}

uint64_t object_bytes(const struct memory_object *object)
{
    uint64_t end = object->size;
    for (const struct memory_mapping *mapping = object->first_mapping; mapping != NULL; mapping = mapping->next)
        if (mapping->offset + mapping->size > end) end = mapping->offset + mapping->size;
    return end;
}

void json_object_members(struct json_writer *json, const struct memory_object *object, const struct device_facts *facts)
{
    static const char *const kinds[] = {
        [OBJECT_ALLOC] = "alloc", [OBJECT_VMM] = "vmm", [OBJECT_IMPORT] = "import", [OBJECT_OPENED] = "opened"};
    json_integer_member(json, "{\"id\":", object->id);
    json_integer_member(json, ",\"size\":", object_bytes(object));
    json_integer_member(json, ",\"device\":", (uint64_t)object->device);
    json_raw(json, ",\"uuid\":");
    write_uuid(json, facts, object->device);
    json_raw(json, ",\"kind\":");
    json_string(json, kinds[object->kind]);
    json_integer_member(json, ",\"requested\":", object->requested);
    json_raw(json, ",\"mappings\":[");
    write_mappings(json, object);
    json_raw(json, "]");
    if (object->ways_out != 0) write_shared(json, object);
    if (object->kind == OBJECT_OPENED) write_exporter(json, &object->opened);
    const char *obstacle = object_is_own(object) ? NULL : import_obstacle(object);
    if (obstacle == NULL) return;
    json_raw(json, ",\"obstacle\":");
    json_string(json, obstacle);
}
