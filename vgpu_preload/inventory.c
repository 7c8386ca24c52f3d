#include "inventory.h"

#include <unistd.h>

#include "held.h"
#include "object_json.h"

/* More are counted in one line: a list of thousands helps nobody. */
#define MOST_BLOCKERS 1000

/* The application goes on meanwhile: the lock is taken for each object, and what comes or goes is told in RESTED. */
static void write_objects(struct json_writer *json, const struct device_facts *facts, bool are_own)
{
    bool is_first = true, is_end = false;
    for (unsigned int place = 0; !is_end; place++) {
        objects_lock();
        is_end = place >= objects_end();
        struct memory_object *object = object_at_place(place);
        if (object != NULL && !object->is_dead && (are_own ? object_is_own(object) : object_is_import(object))) {
            if (!is_first) json_raw(json, ",");
            json_object_members(json, object, facts);
            json_raw(json, "}");
            object->is_announced = are_own;
            is_first = false;
        }
        objects_unlock();
    }
}

static void write_movable(struct json_writer *json, const struct device_facts *facts)
{
    objects_lock();
    objects_start_announcing();
    objects_unlock();
    write_objects(json, facts, true);
}

static void write_driver_held(struct json_writer *json)
{
    bool is_first = true;
    for (enum held_kind kind = HELD_SMALL; kind <= HELD_LAST_OF_DRIVER; kind++) {
        struct held_sum sum = held_sum(kind);
        if (sum.count == 0) continue;
        json_raw(json, is_first ? "{\"kind\":" : ",{\"kind\":");
        json_string(json, held_name(kind));
        json_integer_member(json, ",\"count\":", sum.count);
        json_integer_member(json, ",\"bytes\":", sum.bytes);
        json_raw(json, "}");
        is_first = false;
    }
}

struct blocker {
    const char *kind;
    uint64_t address;
    uint64_t bytes;
    const char *what;
    uint64_t object; /* 0: none of the table */
    int peers[MOST_PEERS];
    unsigned int peer_count;
};

static void write_blocker(struct json_writer *json, const struct blocker *blocker, unsigned int *count)
{
    if (++*count > MOST_BLOCKERS) return;
    json_raw(json, *count == 1 ? "{\"kind\":" : ",{\"kind\":");
    json_string(json, blocker->kind);
    json_hex_member(json, ",\"va\":", blocker->address);
    json_integer_member(json, ",\"bytes\":", blocker->bytes);
    json_raw(json, ",\"what\":");
    json_string(json, blocker->what);
    if (blocker->object != 0) json_integer_member(json, ",\"object\":", blocker->object);
    if (blocker->peer_count != 0) {
        json_raw(json, ",\"peers\":");
        json_peers(json, blocker->peers, blocker->peer_count);
    }
    json_raw(json, "}");
}

/* One text at a time; the helper is the only thread that comes here. */
static char text[256];

static struct json_writer text_begin(void)
{
    return (struct json_writer){.start = text, .at = text, .end = text + sizeof text - 1};
}

static const char *text_end(struct json_writer *writer)
{
    *writer->at = '\0';
    return text;
}

static const char *text_of_import(void)
{
    struct json_writer what = text_begin();
    json_integer_member(&what, "memory imported by process ", (uint64_t)getpid());
    json_raw(&what, " with cuMemImportFromShareableHandle, whose owner is not known here");
    return text_end(&what);
}

static const char *text_of_opened(const struct memory_object *object)
{
    struct json_writer what = text_begin();
    json_integer_member(&what, "memory of process ", (uint64_t)object->opened.process);
    json_integer_member(&what, " (its object ", object->opened.object);
    json_integer_member(&what, "), opened by process ", (uint64_t)getpid());
    json_raw(&what, " with cuIpcOpenMemHandle");
    return text_end(&what);
}

static const char *text_of_export(const struct memory_object *object)
{
    struct json_writer what = text_begin();
    json_integer_member(&what, "memory of process ", (uint64_t)getpid());
    if ((object->ways_out & BY_DESCRIPTOR) != 0) {
        json_raw(&what, ", given away with cuMemExportToShareableHandle");
        return text_end(&what);
    }
    json_raw(&what, ", offered with cuIpcGetMemHandle and fetched by ");
    if (object->peer_count == 0) json_raw(&what, "nobody");
    for (unsigned int n = 0; n < object->peer_count && n < MOST_PEERS; n++)
        json_integer_member(&what, n == 0 ? "process " : ", process ", (uint64_t)object->peers[n]);
    if (object->peer_count > MOST_PEERS) {
        json_integer_member(&what, " and ", object->peer_count - MOST_PEERS);
        json_raw(&what, " more");
    }
    return text_end(&what);
}

/* False: nothing about this object is in the way. */
static bool blocker_of(const struct memory_object *object, struct blocker *blocker)
{
    if (object == NULL || object->is_dead) return false;
    *blocker = (struct blocker){.address = object->first_mapping != NULL ? object->first_mapping->address : 0,
                                .bytes = object_bytes(object),
                                .object = object->id,
                                .peer_count = object->peer_count};
    __builtin_memcpy(blocker->peers, object->peers, sizeof blocker->peers);
    if (object->kind == OBJECT_HOST) {
        blocker->kind = "host-vmm";
        blocker->what = held_meaning(BLOCKER_HOST_VMM);
    } else if (object->kind == OBJECT_IMPORT && object->asked_handle_types == CU_MEM_HANDLE_TYPE_FABRIC) {
        blocker->kind = "fabric";
        blocker->what = "imported by a fabric handle";
    } else if (object->kind == OBJECT_IMPORT) {
        blocker->kind = "import";
        blocker->what = text_of_import();
    } else if (object->kind == OBJECT_OPENED) {
        blocker->kind = "ipc-opened";
        blocker->what = text_of_opened(object);
    } else if (object->obstacle != NULL) {
        blocker->kind = (object->ways_out & BY_FABRIC) != 0 ? "fabric" : "vmm";
        blocker->what = object->obstacle;
    } else if (object->ways_out != 0) {
        blocker->kind = (object->ways_out & BY_DESCRIPTOR) != 0 ? "export" : "ipc-exported";
        blocker->what = text_of_export(object);
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
        struct blocker blocker = {.kind = held_name(entry.kind),
                                  .address = entry.key & ~1ULL,
                                  .bytes = entry.bytes,
                                  .what = held_meaning(entry.kind)};
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
    json_integer_member(json, ",{\"kind\":\"more\",\"va\":\"0x0\",\"bytes\":0,\"what\":\"blockers not listed: ",
                 count - MOST_BLOCKERS);
    json_raw(json, "\"}");
}

bool answer_inventory(const struct request *request, const struct device_facts *facts)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"objects\":[");
    write_movable(&json, facts);
    json_raw(&json, "],\"imports\":[");
    write_objects(&json, facts, false);
    json_raw(&json, "],\"driver_held\":[");
    write_driver_held(&json);
    json_raw(&json, "],\"blockers\":[");
    write_blockers(&json);
    json_raw(&json, "]}");
    return reply_send(request, FRAME_INVENTORY_IS, &json);
}

/* What is told of it in a fault; NULL: it can go and come back. */
static const char *forbidden(const struct memory_object *object, bool takes_imports)
{
    struct blocker blocker;
    if (!blocker_of(object, &blocker)) return NULL;
    if (object_is_own(object)) return object->obstacle != NULL ? blocker.what : NULL;
    return takes_imports && object_is_import(object) ? import_obstacle(object) : blocker.what;
}

struct fault obstacle_to_release(bool takes_imports)
{
    bool is_end = false;
    for (unsigned int place = 0; !is_end; place++) {
        objects_lock();
        is_end = place >= objects_end();
        struct memory_object *object = object_at_place(place);
        const char *what = forbidden(object, takes_imports);
        uint64_t id = what != NULL ? object->id : 0;
        objects_unlock();
        if (what != NULL) return (struct fault){.what = what, .object = id};
    }
    return (struct fault){0};
}
