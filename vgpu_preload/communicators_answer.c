#include "communicators_answer.h"

#include "communicators.h"
#include "nccl_calls.h"
#include "nvshmem_facts.h"

static void write_member(struct json_writer *json, const char *before, long value)
{
    json_raw(json, before);
    json_integer(json, value);
}

static void write_id(struct json_writer *json, const char *before, const struct communicator_id *id)
{
    static const char digits[] = "0123456789abcdef";
    char hex[2 * COMMUNICATOR_ID_SIZE + 1];
    for (int n = 0; n < COMMUNICATOR_ID_SIZE; n++) {
        hex[2 * n] = digits[id->bytes[n] >> 4];
        hex[2 * n + 1] = digits[id->bytes[n] & 0xf];
    }
    hex[2 * COMMUNICATOR_ID_SIZE] = '\0';
    json_raw(json, before);
    json_string(json, hex);
}

static void write_version(struct json_writer *json, long major, long minor, long patch)
{
    write_member(json, ",\"version\":\"", major);
    write_member(json, ".", minor);
    write_member(json, ".", patch);
    json_raw(json, "\"");
}

/* NCCL_VERSION: two digits for each part since 2.9, one for the minor version before. */
static void write_nccl_version(struct json_writer *json, long code)
{
    long major = code < 10000 ? 1000 : 10000;
    write_version(json, code / major, code % major / 100, code % 100);
}

static void write_communicator(struct json_writer *json, const struct communicator_rest *rest)
{
    const struct communicator_facts *facts = &rest->facts;
    json_raw(json, "{\"library\":\"nccl\"");
    write_nccl_version(json, facts->version);
    write_id(json, ",\"id\":", &facts->id);
    write_member(json, ",\"rank\":", facts->rank);
    write_member(json, ",\"size\":", facts->size);
    write_member(json, ",\"device\":", facts->device);
    write_member(json, ",\"sequence\":{\"collectives\":", (long)rest->collectives);
    write_member(json, ",\"pointToPoint\":", (long)rest->point_to_point);
    json_raw(json, "}");
    if (facts->has_parent) write_id(json, ",\"parent\":", &facts->parent);
    if (facts->has_split) {
        write_member(json, ",\"split\":{\"color\":", facts->color);
        write_member(json, ",\"key\":", facts->key);
        json_raw(json, "}");
    }
    if (rest->is_finalized) json_raw(json, ",\"finalized\":true");
    json_raw(json, "}");
}

/* Gives how many have not begun. */
static unsigned long write_communicators(struct json_writer *json)
{
    struct communicator_rest rest;
    unsigned int place = 0;
    unsigned long starting = nccl_unborn();
    const char *between = "";
    while (communicator_next(&place, &rest)) {
        if (!rest.facts.is_known) {
            starting++;
            continue;
        }
        json_raw(json, between);
        write_communicator(json, &rest);
        between = ",";
    }
    return starting;
}

/* The library's own teams by its names for them, others by their handle. */
static void write_team_name(struct json_writer *json, nvshmem_team_t team)
{
    static const char *const names[] = {"world", "shared", "node", "same-mype-node", "same-gpu", "gpu-leaders"};
    if (team >= 0 && team < (nvshmem_team_t)(sizeof names / sizeof *names)) {
        json_string(json, names[team]);
        return;
    }
    json_raw(json, "\"");
    json_integer(json, team);
    json_raw(json, "\"");
}

static void write_team(struct json_writer *json, const struct nvshmem_team *team)
{
    json_raw(json, "{\"name\":");
    write_team_name(json, team->team);
    write_member(json, ",\"pe\":", team->pe);
    write_member(json, ",\"size\":", team->size);
    json_raw(json, ",\"parent\":");
    write_team_name(json, team->parent);
    json_raw(json, "}");
}

static void write_element(struct json_writer *json, const struct nvshmem_facts *facts)
{
    json_raw(json, "{\"library\":\"nvshmem\"");
    write_version(json, facts->major, facts->minor, facts->patch);
    write_member(json, ",\"pe\":", facts->pe);
    write_member(json, ",\"size\":", facts->size);
    if (facts->device >= 0) write_member(json, ",\"device\":", facts->device);
    json_raw(json, ",\"teams\":[");
    for (unsigned int n = 0; n < facts->team_count; n++) {
        if (n > 0) json_raw(json, ",");
        write_team(json, &facts->teams[n]);
    }
    json_raw(json, "]}");
}

bool answer_communicators(const struct request *request)
{
    const struct nvshmem_facts *element = nvshmem_facts();
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"communicators\":[");
    unsigned long starting = write_communicators(&json);
    json_raw(&json, "],\"nvshmem\":[");
    if (element->is_there) write_element(&json, element);
    write_member(&json, "],\"starting\":", (long)starting);
    write_member(&json, ",\"unlisted\":", (long)(communicators_unlisted() + element->unlisted));
    json_raw(&json, "}");
    return reply_send(request, FRAME_COMMUNICATORS_ARE, &json);
}
