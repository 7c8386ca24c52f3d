#define _GNU_SOURCE
#include "staging.h"

#include <string.h>

#include "allocation.h"
#include "app_descriptors.h"
#include "clock.h"
#include "communicators_answer.h"
#include "contexts.h"
#include "device_facts.h"
#include "driver.h"
#include "gate.h"
#include "held.h"
#include "inventory.h"
#include "memory_moves.h"
#include "object_json.h"
#include "objects.h"
#include "peers.h"
#include "quiesce.h"
#include "share_service.h"
#include "shares.h"

#define REST_DEADLINE_MS 60000 /* when the agent names none */
#define LONGEST_PASSAGE_WAIT_MS 1000

enum phase { PHASE_OPEN, PHASE_HALTED, PHASE_RESTED, PHASE_RELEASED };

static enum phase phase;
static struct device_facts *device_facts;

bool staging_prepare(struct device_facts *facts, const void *driver_function)
{
    device_facts = facts;
    return driver_find(driver_function) && objects_make() && held_make();
}

void staging_begin(void)
{
    phase = PHASE_OPEN;
    gate_build();
}

void staging_give_up(void)
{
    gate_after_fork_in_child();
}

void staging_after_fork_in_child(void)
{
    if (!gate_is_there) return;
    gate_after_fork_in_child();
    descriptors_give_up();
    objects_forget_all();
    allocations_forget_all();
    held_forget_all();
    contexts_forget_all();
    peers_forget_all();
    quiesce_after_fork_in_child();
}

void staging_hello(struct hello_staged *hello)
{
    static const char *const names[] = {"open", "halted", "rested", "released"};
    objects_lock();
    struct objects_held held = objects_held();
    objects_unlock();
    *hello = (struct hello_staged){.phase = names[phase], .objects = held.count, .bytes = held.bytes};
    for (enum held_kind kind = HELD_SMALL; kind <= HELD_LAST_OF_DRIVER; kind++)
        hello->driver_bytes += held_sum(kind).bytes;
}

bool staging_expects_descriptors(void)
{
    return phase == PHASE_RELEASED;
}

void staging_agent_is_gone(void)
{
    if (phase != PHASE_HALTED && phase != PHASE_RESTED) return;
    phase = PHASE_OPEN;
    quiesce_end();
}

static uint64_t number_of(const struct request *request, const char *name, uint64_t absent, uint64_t most)
{
    struct json_text value;
    uint64_t number = absent;
    if (json_member(request->payload, name, &value)) json_read_integer(&value, &number);
    return number < most ? number : most;
}

static int64_t deadline_of(const struct request *request)
{
    return (int64_t)number_of(request, "deadline_ms", REST_DEADLINE_MS, INT32_MAX);
}

static bool answer_nothing(const struct request *request, enum frame_type type)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{}");
    return reply_send(request, type, &json);
}

static bool answer_halt(const struct request *request)
{
    struct fault fault = {0};
    if (phase == PHASE_RESTED || phase == PHASE_RELEASED) fault.what = "the process is at rest already";
    if (phase == PHASE_OPEN) fault = halt(deadline_of(request));
    if (fault.what != NULL) return reply_failed(request, &fault);
    phase = PHASE_HALTED;
    return answer_nothing(request, FRAME_HALTED);
}

static void write_claim(struct json_writer *json, const char *name, bool claim)
{
    json_raw(json, name);
    json_raw(json, claim ? "true" : "false");
}

static bool send_passed(const struct request *request, const struct passages *passages)
{
    struct json_writer json = reply_begin();
    json_integer_member(&json, "{\"passed\":", passages->passed);
    json_integer_member(&json, ",\"waiting\":", passages->waiting);
    json_integer_member(&json, ",\"inside\":", passages->inside);
    write_claim(&json, ",\"capturing\":", passages->is_capturing);
    write_claim(&json, ",\"idle\":", passages->is_idle);
    json_raw(&json, "}");
    return reply_send(request, FRAME_PASSED, &json);
}

static bool answer_let_pass(const struct request *request)
{
    struct passages passages;
    if (phase != PHASE_HALTED) return reply_failed(request, &(struct fault){.what = "the process is not halted"});
    uint32_t calls = (uint32_t)number_of(request, "calls", 0, INT32_MAX);
    struct fault fault =
        halt_let_pass(calls, (int64_t)number_of(request, "wait_ms", 0, LONGEST_PASSAGE_WAIT_MS), &passages);
    if (fault.what == NULL) return send_passed(request, &passages);
    phase = PHASE_OPEN;
    return reply_failed(request, &fault);
}

static void write_new(struct json_writer *json)
{
    bool is_first = true;
    uint64_t id;
    struct object_walk walk = {.is_all = true};
    while (walk_next(&walk, &id)) {
        objects_lock();
        struct memory_object *object = object_with_id(id);
        bool is_new = object != NULL && !object->is_announced;
        objects_unlock();
        if (!is_new) continue;
        if (!is_first) json_raw(json, ",");
        json_integer(json, (long)id);
        is_first = false;
    }
}

static void write_gone(struct json_writer *json)
{
    static uint64_t ids[MOST_OBJECTS];
    objects_lock();
    unsigned int count = objects_gone(ids, MOST_OBJECTS);
    objects_unlock();
    for (unsigned int n = 0; n < count; n++) {
        if (n > 0) json_raw(json, ",");
        json_integer(json, (long)ids[n]);
    }
}

static bool send_rested(const struct request *request, const struct rest_times *times)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"waited_ms\":");
    json_integer(&json, times->waited_ms);
    json_raw(&json, ",\"sync_ms\":");
    json_integer(&json, times->sync_ms);
    json_raw(&json, ",\"new\":[");
    write_new(&json);
    json_raw(&json, "],\"gone\":[");
    write_gone(&json);
    json_raw(&json, "]}");
    return reply_send(request, FRAME_RESTED, &json);
}

static bool answer_rest(const struct request *request)
{
    struct rest_times times = {0, 0};
    if (phase == PHASE_RELEASED) return reply_failed(request, &(struct fault){.what = "the memory is released"});
    if (phase == PHASE_RESTED) return send_rested(request, &times);
    struct fault fault = quiesce(deadline_of(request), phase == PHASE_HALTED, &times);
    phase = fault.what == NULL ? PHASE_RESTED : PHASE_OPEN;
    if (fault.what != NULL) return reply_failed(request, &fault);
    allocations_free_waiting();
    return send_rested(request, &times);
}

/* Work on memory is done in some context of the process; which one does not matter to the driver. */
static void choose_context(void)
{
    static CUcontext contexts[MOST_CONTEXTS];
    unsigned int count = contexts_copy(contexts);
    for (unsigned int n = 0; n < count; n++)
        if (driver.cuCtxSetCurrent(contexts[n]) == CUDA_SUCCESS) return;
}

static bool answer_done(const struct request *request, enum frame_type type, int64_t begin, const struct fault *fault)
{
    driver.cuCtxSetCurrent(NULL);
    if (fault->what != NULL) return reply_failed(request, fault);
    objects_lock();
    struct objects_held held = objects_held();
    objects_unlock();
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"objects\":");
    json_integer(&json, held.count);
    json_raw(&json, ",\"ms\":");
    json_integer(&json, clock_now_ms() - begin);
    json_raw(&json, "}");
    return reply_send(request, type, &json);
}

static bool is_true(const struct request *request, const char *name)
{
    struct json_text value;
    return json_member(request->payload, name, &value) && json_is_true(value);
}

static bool answer_release(const struct request *request)
{
    int64_t begin = clock_now_ms();
    struct fault fault = {.what = "the process is not at rest"};
    bool takes_imports = is_true(request, "imports");
    if (phase != PHASE_RESTED && phase != PHASE_RELEASED) return reply_failed(request, &fault);
    fault = obstacle_to_release(takes_imports);
    if (fault.what != NULL) return reply_failed(request, &fault);
    phase = PHASE_RELEASED;
    share_service_close(CLOSED_FOR_RELEASE);
    choose_context();
    fault = release_all(takes_imports);
    if (fault.what == NULL) fault = put_placeholders(request);
    return answer_done(request, FRAME_RELEASED, begin, &fault);
}

/* Numbers of the application's change hands only while its memory is away. */
static bool take_descriptors(const struct request *request)
{
    if (phase == PHASE_RELEASED && take_descriptors_for_numbers(request)) return true;
    return take_descriptors_of(request);
}

static bool answer_map(const struct request *request)
{
    int64_t begin = clock_now_ms();
    struct object_walk walk;
    struct fault fault = {.what = "nothing is released"};
    if (phase != PHASE_RELEASED) return reply_failed(request, &fault);
    if (!walk_begin(&walk, request)) return reply_failed(request, &list_is_broken);
    choose_context();
    fault = map_objects(&walk);
    if (fault.what == NULL) device_facts_renew(device_facts);
    return answer_done(request, FRAME_MAPPED, begin, &fault);
}

static bool answer_open(const struct request *request)
{
    struct fault fault = phase == PHASE_RELEASED ? first_missing() : (struct fault){0};
    if (fault.what != NULL) return reply_failed(request, &fault);
    if (phase != PHASE_OPEN) quiesce_end();
    phase = PHASE_OPEN;
    share_service_open(CLOSED_FOR_RELEASE);
    return answer_nothing(request, FRAME_OPENED);
}

bool staging_answer(const struct frame *frame, const char *payload, const int *descriptors, size_t count)
{
    struct request request = {.frame = frame,
                              .payload = {.at = payload, .end = payload + frame->payload_size},
                              .descriptors = descriptors,
                              .descriptor_count = count};
    switch (frame->type) {
    case FRAME_INVENTORY: return answer_inventory(&request, device_facts);
    case FRAME_EXPORT: return answer_export(&request);
    case FRAME_SHARES: return answer_shares(&request, device_facts);
    case FRAME_COMMUNICATORS: return answer_communicators(&request);
    case FRAME_HALT: return answer_halt(&request);
    case FRAME_LET_PASS: return answer_let_pass(&request);
    case FRAME_REST: return answer_rest(&request);
    case FRAME_RELEASE: return answer_release(&request);
    case FRAME_FDS: return take_descriptors(&request);
    case FRAME_MAP: return answer_map(&request);
    case FRAME_OPEN: return answer_open(&request);
    default: return true;
    }
}
