#include "shares.h"

#include "loose_descriptors.h"
#include "object_json.h"

static bool is_shared(const struct memory_object *object)
{
    return object != NULL && !object->is_dead && (object_is_import(object) || (object_is_own(object) && object->ways_out != 0));
}

/* The id of the next shared object at or behind `place`, which moves behind it. */
static bool next_shared(unsigned int *place, uint64_t *id)
{
    bool found = false;
    objects_lock();
    for (; !found && *place < objects_end(); ++*place) {
        struct memory_object *object = object_at_place(*place);
        found = is_shared(object);
        if (found) *id = object->id;
    }
    objects_unlock();
    return found;
}

static struct memory_object *shared_with_id(uint64_t id)
{
    struct memory_object *object = object_with_id(id);
    return is_shared(object) ? object : NULL;
}

static int descriptor_of_share(uint64_t id)
{
    objects_lock();
    struct memory_object *object = shared_with_id(id);
    int descriptor = -1;
    if (object != NULL) descriptor = loose_copy(object_descriptor(object));
    objects_unlock();
    return descriptor;
}

struct parcel {
    int descriptors[DESCRIPTORS_A_FRAME];
    uint64_t ids[DESCRIPTORS_A_FRAME];
    size_t count;
};

static bool send_parcel(const struct request *request, struct parcel *parcel)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"objects\":[");
    for (size_t n = 0; n < parcel->count; n++) json_integer_member(&json, n == 0 ? "" : ",", parcel->ids[n]);
    json_raw(&json, "]}");
    bool sent = parcel->count == 0 || reply_send_descriptors(request, &json, parcel->descriptors, parcel->count);
    for (size_t n = 0; n < parcel->count; n++) loose_close(parcel->descriptors[n]);
    parcel->count = 0;
    return sent;
}

static bool send_all_descriptors(const struct request *request)
{
    struct parcel parcel = {.count = 0};
    unsigned int place = 0;
    uint64_t id;
    bool sent = true;
    descriptors_allow_more();
    while (sent && next_shared(&place, &id)) {
        int descriptor = descriptor_of_share(id);
        if (descriptor < 0) continue;
        parcel.descriptors[parcel.count] = descriptor;
        parcel.ids[parcel.count++] = id;
        if (parcel.count == DESCRIPTORS_A_FRAME) sent = send_parcel(request, &parcel);
    }
    sent = send_parcel(request, &parcel) && sent;
    descriptors_allow_as_before();
    return sent;
}

static void write_share(struct json_writer *json, const struct memory_object *object, const struct device_facts *facts,
                        bool is_first)
{
    if (!is_first) json_raw(json, ",");
    json_object_members(json, object, facts);
    json_raw(json, object_is_own(object) ? ",\"role\":\"exporter\"}" : ",\"role\":\"importer\"}");
}

bool answer_shares(const struct request *request, const struct device_facts *facts)
{
    unsigned int place = 0;
    uint64_t id;
    bool is_first = true;
    if (!send_all_descriptors(request)) return false;
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"shares\":[");
    while (next_shared(&place, &id)) {
        objects_lock();
        struct memory_object *object = shared_with_id(id);
        if (object != NULL) write_share(&json, object, facts, is_first);
        is_first = is_first && object == NULL;
        objects_unlock();
    }
    json_raw(&json, "]}");
    return reply_send(request, FRAME_SHARES_ARE, &json);
}
