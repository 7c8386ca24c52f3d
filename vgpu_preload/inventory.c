#include "inventory.h"

#include "held.h"

/* More are counted in one line: a list of thousands helps nobody. */
#define MOST_BLOCKERS 1000

static void write_hex_member(struct json_writer *json, const char *name, uint64_t value)
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

static void write_member(struct json_writer *json, const char *name, uint64_t value)
{
    json_raw(json, name);
    json_integer(json, (long)value);
}

static void write_access(struct json_writer *json, const struct memory_mapping *mapping)
{
    bool is_first = true;
    for (int device = 0; device < MOST_DEVICES; device++) {
        if (mapping->access[device] == 0) continue;
        write_member(json, is_first ? "[" : ",[", (uint64_t)device);
        write_member(json, ",", mapping->access[device]);
        json_raw(json, "]");
        is_first = false;
    }
}

static void write_mappings(struct json_writer *json, const struct memory_object *object)
{
    for (const struct memory_mapping *mapping = object->first_mapping; mapping != NULL; mapping = mapping->next) {
        write_hex_member(json, mapping == object->first_mapping ? "{\"va\":" : ",{\"va\":", mapping->address);
        write_member(json, ",\"size\":", mapping->size);
        write_member(json, ",\"offset\":", mapping->offset);
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

static void write_object(struct json_writer *json, const struct memory_object *object, const struct device_facts *facts)
{
    write_member(json, "{\"id\":", object->id);
    write_member(json, ",\"size\":", object->size);
    write_member(json, ",\"device\":", (uint64_t)object->device);
    json_raw(json, ",\"uuid\":");
    write_uuid(json, facts, object->device);
    json_raw(json, object->kind == OBJECT_ALLOC ? ",\"kind\":\"alloc\"" : ",\"kind\":\"vmm\"");
    write_member(json, ",\"requested\":", object->requested);
    json_raw(json, ",\"mappings\":[");
    write_mappings(json, object);
    json_raw(json, "]}");
}

static bool is_movable(const struct memory_object *object)
{
    return object != NULL && object->kind != OBJECT_IMPORT && !object->is_dead;
}

/* The application goes on meanwhile: the lock is taken for each object, and what comes or goes is told in RESTED. */
static void write_objects(struct json_writer *json, const struct device_facts *facts)
{
    bool is_first = true, is_end = false;
    objects_lock();
    objects_start_announcing();
    objects_unlock();
    for (unsigned int place = 0; !is_end; place++) {
        objects_lock();
        is_end = place >= objects_end();
        struct memory_object *object = object_at_place(place);
        if (is_movable(object)) {
            if (!is_first) json_raw(json, ",");
            write_object(json, object, facts);
            object->is_announced = true;
            is_first = false;
        }
        objects_unlock();
    }
}

static void write_driver_held(struct json_writer *json)
{
    bool is_first = true;
    for (enum held_kind kind = HELD_SMALL; kind <= HELD_LAST_OF_DRIVER; kind++) {
        struct held_sum sum = held_sum(kind);
        if (sum.count == 0) continue;
        json_raw(json, is_first ? "{\"kind\":" : ",{\"kind\":");
        json_string(json, held_name(kind));
        write_member(json, ",\"count\":", sum.count);
        write_member(json, ",\"bytes\":", sum.bytes);
        json_raw(json, "}");
        is_first = false;
    }
}

struct blocker {
    const char *kind;
    uint64_t address;
    uint64_t bytes;
    const char *what;
};

static void write_blocker(struct json_writer *json, const struct blocker *blocker, unsigned int *count)
{
    if (++*count > MOST_BLOCKERS) return;
    json_raw(json, *count == 1 ? "{\"kind\":" : ",{\"kind\":");
    json_string(json, blocker->kind);
    write_hex_member(json, ",\"va\":", blocker->address);
    write_member(json, ",\"bytes\":", blocker->bytes);
    json_raw(json, ",\"what\":");
    json_string(json, blocker->what);
    json_raw(json, "}");
}

static uint64_t mapped_bytes(const struct memory_object *object)
{
    uint64_t bytes = 0;
    for (const struct memory_mapping *mapping = object->first_mapping; mapping != NULL; mapping = mapping->next)
        bytes += mapping->size;
    return bytes;
}

/* False: nothing about this object is in the way. */
static bool blocker_of(const struct memory_object *object, struct blocker *blocker)
{
    if (object == NULL || object->is_dead) return false;
    *blocker = (struct blocker){.address = object->first_mapping != NULL ? object->first_mapping->address : 0,
                                .bytes = object->kind == OBJECT_IMPORT ? mapped_bytes(object) : object->size};
    if (object->kind == OBJECT_IMPORT) {
        blocker->kind = "import";
        blocker->what = "memory imported with cuMemImportFromShareableHandle";
    } else if (object->obstacle != NULL) {
        blocker->kind = "vmm";
        blocker->what = object->obstacle;
    } else if (object->is_exported) {
        blocker->kind = "export";
        blocker->what = "memory given away with cuMemExportToShareableHandle";
    }
    return blocker->kind != NULL;
}

static void write_blockers_of_objects(struct json_writer *json, unsigned int *count)
{
    bool is_end = false;
    for (unsigned int place = 0; !is_end; place++) {
        struct blocker blocker;
        objects_lock();
        is_end = place >= objects_end();
        bool is_one = blocker_of(object_at_place(place), &blocker);
        objects_unlock();
        if (is_one) write_blocker(json, &blocker, count);
    }
}

static void write_blockers_held(struct json_writer *json, unsigned int *count)
{
    struct held_entry entry;
    for (unsigned int place = 0; (place = held_next_blocker(place, &entry)) != 0;) {
        struct blocker blocker = {held_name(entry.kind), entry.key & ~1ULL, entry.bytes, held_meaning(entry.kind)};
        write_blocker(json, &blocker, count);
    }
}

static void write_blockers(struct json_writer *json)
{
    unsigned int count = 0;
    write_blockers_of_objects(json, &count);
    write_blockers_held(json, &count);
    if (held_unknown_call() != 0)
        write_blocker(json,
                      &(struct blocker){.kind = "unknown-call",
                                        .address = held_unknown_call(),
                                        .what = "a form of a call that is newer than this library"},
                      &count);
    if (count <= MOST_BLOCKERS) return;
    write_member(json, ",{\"kind\":\"more\",\"va\":\"0x0\",\"bytes\":0,\"what\":\"blockers not listed: ",
                 count - MOST_BLOCKERS);
    json_raw(json, "\"}");
}

bool answer_inventory(const struct request *request, const struct device_facts *facts)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"objects\":[");
    write_objects(&json, facts);
    json_raw(&json, "],\"driver_held\":[");
    write_driver_held(&json);
    json_raw(&json, "],\"blockers\":[");
    write_blockers(&json);
    json_raw(&json, "]}");
    return reply_send(request, FRAME_INVENTORY_IS, &json);
}

struct fault obstacle_to_release(void)
{
    bool is_end = false;
    for (unsigned int place = 0; !is_end; place++) {
        objects_lock();
        is_end = place >= objects_end();
        struct memory_object *object = object_at_place(place);
        struct blocker blocker;
        bool forbids = blocker_of(object, &blocker) && (object->kind == OBJECT_IMPORT || object->obstacle != NULL);
        uint64_t id = forbids ? object->id : 0;
        objects_unlock();
        if (forbids) return (struct fault){.what = blocker.what, .object = id};
    }
    return (struct fault){0};
}
