#define _GNU_SOURCE
#include "quiesce.h"

#include "clock.h"
#include "contexts.h"
#include "gate.h"
#include "synchroniser.h"

#define CAPTURE_POLL_US 500
#define SYNCHRONISER_END_MS 1000 /* it has nothing left to do */

static struct fault fault_of(const char *what)
{
    return (struct fault){.what = what};
}

/* On a fault nothing of it is left: the gate is open, the synchroniser ends. */
static struct fault give_up(struct fault fault)
{
    if (fault.what != NULL) quiesce_end();
    return fault;
}

static bool wait_for_captures(int64_t end_ms)
{
    for (captures_check(); capture_is_active(); captures_check()) {
        if (clock_now_ms() >= end_ms) return false;
        clock_sleep_us(CAPTURE_POLL_US);
    }
    return true;
}

/* A capture ends with a call of the application, so it must not be caught behind the gate. */
static struct fault close_gate(int64_t end_ms)
{
    for (;;) {
        if (!wait_for_captures(end_ms)) return fault_of("a stream capture is in progress");
        if (!gate_close(end_ms)) return fault_of("a call did not return before the deadline");
        if (!capture_is_active()) return (struct fault){0};
        gate_open();
    }
}

static struct fault empty_halted_gate(int64_t end_ms)
{
    gate_permit(0);
    if (!gate_wait_until_empty(end_ms)) return fault_of("a call did not return before the deadline");
    captures_check();
    return capture_is_active() ? fault_of("a stream capture is in progress") : (struct fault){0};
}

static struct fault fault_of_sync(CUresult rc)
{
    return rc != CUDA_SUCCESS ? (struct fault){.what = "cuCtxSynchronize failed", .code = rc} : (struct fault){0};
}

/* A halted process may have asked before; what that gave is not asked for again. */
static struct fault synchronise_until(int64_t end_ms)
{
    CUresult rc = CUDA_SUCCESS;
    bool is_done = synchroniser_wait(end_ms, &rc);
    if (is_done) {
        synchroniser_ask();
        is_done = synchroniser_wait(end_ms, &rc);
    }
    if (!is_done) return fault_of("work on the device did not end before the deadline");
    synchroniser_dismiss();
    synchroniser_wait_for_end(clock_now_ms() + SYNCHRONISER_END_MS);
    return fault_of_sync(rc);
}

struct fault quiesce(int64_t deadline_ms, bool is_halted, struct rest_times *times)
{
    int64_t begin = clock_now_ms(), end = begin + deadline_ms, closed;
    struct fault fault = is_halted ? empty_halted_gate(end) : synchroniser_start(end);
    if (fault.what == NULL && !is_halted) fault = close_gate(end);
    closed = clock_now_ms();
    if (fault.what == NULL) fault = synchronise_until(end);
    *times = (struct rest_times){.waited_ms = closed - begin, .sync_ms = clock_now_ms() - closed};
    return give_up(fault);
}

void quiesce_end(void)
{
    gate_open();
    synchroniser_dismiss();
}

/* ---- halt -------------------------------------------------------------------------------------- */

#define PASSAGE_POLL_US 50
#define SLOW_POLL_US 500
#define SLOW_AFTER_MS 5
#define SETTLED_MS 2 /* work that is still not done so long after its last call is waiting for somebody */

/* What the synchroniser has been asked, in terms of the calls that had passed by then. */
static struct {
    bool is_asked;      /* and has not answered */
    uint32_t asked_at;
    bool has_answered;
    uint32_t answered_at;
} sync_state;

static void close_gate_without_waiting(void)
{
    gate_synchronising_ended();
    sync_state.is_asked = sync_state.has_answered = false;
    gate_shut();
}

struct fault halt(int64_t deadline_ms)
{
    int64_t end = clock_now_ms() + deadline_ms;
    struct fault fault = synchroniser_start(end);
    if (fault.what != NULL) return fault;
    while (wait_for_captures(end)) {
        close_gate_without_waiting();
        if (!capture_is_active()) return fault;
        gate_open();
    }
    return give_up(fault_of("a stream capture is in progress"));
}

static struct fault hear_synchroniser(void)
{
    CUresult rc;
    if (!sync_state.is_asked || !synchroniser_is_done(&rc)) return (struct fault){0};
    sync_state.is_asked = false;
    sync_state.has_answered = true;
    sync_state.answered_at = sync_state.asked_at;
    gate_synchronising_ended();
    return fault_of_sync(rc);
}

static bool is_synchronised(uint32_t passed)
{
    return sync_state.has_answered && sync_state.answered_at == passed;
}

/* What has passed by `count` has returned when nobody is inside, so its work is seen by a synchronisation from now on.
 * A capture that began in one of those calls is known by now. */
static void ask_synchroniser(const struct gate_count *count)
{
    if (sync_state.is_asked || count->inside != 0 || is_synchronised(count->passed) || !gate_begin_synchronising()) return;
    if (capture_is_active()) {
        gate_synchronising_ended();
        return;
    }
    sync_state.is_asked = true;
    sync_state.asked_at = count->passed;
    synchroniser_ask();
}

static struct fault look(struct passages *passages, uint32_t *left)
{
    struct fault fault = hear_synchroniser();
    struct gate_count count = gate_count();
    if (capture_is_active()) captures_check();
    ask_synchroniser(&count);
    bool is_capturing = capture_is_active();
    *left = count.left;
    *passages = (struct passages){
        .passed = count.passed,
        .waiting = count.waiting,
        .inside = count.inside,
        .is_capturing = is_capturing,
        .is_idle = count.inside == 0 && !is_capturing && is_synchronised(count.passed),
    };
    return fault;
}

/* Nothing more happens by itself: all have passed that may, and what they did is done, or waits for others. */
static bool is_settled(const struct passages *passages, uint32_t left, uint32_t calls, int64_t since_ms)
{
    if (left != 0 || passages->inside != 0) return false;
    if (passages->is_idle || passages->is_capturing) return true;
    return calls != 0 && clock_now_ms() - since_ms >= SETTLED_MS;
}

struct fault halt_let_pass(uint32_t calls, int64_t wait_ms, struct passages *passages)
{
    int64_t begin = clock_now_ms(), settled = begin;
    gate_permit(calls);
    for (;;) {
        uint32_t left;
        struct fault fault = look(passages, &left);
        int64_t now = clock_now_ms();
        if (fault.what != NULL) return give_up(fault);
        if (left != 0 || passages->inside != 0) settled = now;
        if (is_settled(passages, left, calls, settled) || now - begin >= wait_ms) return fault;
        clock_sleep_us(now - begin < SLOW_AFTER_MS ? PASSAGE_POLL_US : SLOW_POLL_US);
    }
}

void quiesce_after_fork_in_child(void)
{
    synchroniser_after_fork_in_child();
}
