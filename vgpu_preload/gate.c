#define _GNU_SOURCE
#include "gate.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"

#define DRAIN_POLL_US 20

/* Both halves of `passage` change together: how many have passed, and how many still may. */
#define ONE_LEFT 1ULL
#define ONE_PASSED (1ULL << 32)
#define LEFT(passage) ((passage) & (ONE_PASSED - 1))

_Atomic(bool) gate_is_there;
_Atomic(uint32_t) gate_is_closed;
_Thread_local struct gate_thread gate_thread;

static struct gate_stripe stripes[GATE_STRIPES];
static _Atomic(unsigned int) threads_seen;
static _Atomic(uint64_t) passage;
static _Atomic(uint32_t) waiting;
static _Atomic(bool) is_synchronising;

void gate_choose_stripe(void)
{
    gate_thread.stripe = &stripes[atomic_fetch_add(&threads_seen, 1) % GATE_STRIPES];
}

static long futex(int operation, uint32_t value)
{
    return syscall(SYS_futex, &gate_is_closed, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* Counted inside first, so that whoever voids the permits and then sees nobody inside has missed nobody. */
static bool pass_by_permit(struct gate_stripe *stripe)
{
    if (LEFT(atomic_load(&passage)) == 0) return false;
    atomic_fetch_add(&stripe->inside, 1);
    bool may_pass = !gate_thread.shuns_sync || !atomic_load(&is_synchronising);
    uint64_t now = atomic_load(&passage);
    while (may_pass && LEFT(now) != 0)
        if (atomic_compare_exchange_weak(&passage, &now, now + ONE_PASSED - ONE_LEFT)) return true;
    atomic_fetch_sub(&stripe->inside, 1);
    return false;
}

static bool pass_open_gate(struct gate_stripe *stripe)
{
    atomic_fetch_add(&stripe->inside, 1);
    if (atomic_load(&gate_is_closed) == 0) return true;
    atomic_fetch_sub(&stripe->inside, 1);
    return false;
}

void gate_wait_and_enter(struct gate_stripe *stripe)
{
    bool has_passed = false;
    atomic_fetch_sub(&stripe->inside, 1);
    atomic_fetch_add(&waiting, 1);
    while (!has_passed) {
        uint32_t closed = atomic_load(&gate_is_closed);
        has_passed = closed == 0 ? pass_open_gate(stripe) : pass_by_permit(stripe);
        if (!has_passed && closed != 0) futex(FUTEX_WAIT, closed);
    }
    atomic_fetch_sub(&waiting, 1);
}

void gate_build(void)
{
    atomic_store(&gate_is_there, true);
}

void gate_open(void)
{
    atomic_store(&gate_is_closed, 0);
    futex(FUTEX_WAKE, INT_MAX);
}

/* All of them: one that shuns the synchronising would sleep through the wake-up of another. */
static void wake_at_closed_gate(void)
{
    uint32_t closed = atomic_load(&gate_is_closed);
    atomic_store(&gate_is_closed, closed + 1 != 0 ? closed + 1 : 1);
    futex(FUTEX_WAKE, INT_MAX);
}

void gate_shut(void)
{
    atomic_store(&passage, 0);
    atomic_store(&gate_is_closed, 1);
}

bool gate_wait_until_empty(int64_t end_ms)
{
    for (size_t n = 0; n < GATE_STRIPES; n++)
        while (atomic_load(&stripes[n].inside) != 0) {
            if (clock_now_ms() >= end_ms) return false;
            clock_sleep_us(DRAIN_POLL_US);
        }
    return true;
}

bool gate_close(int64_t end_ms)
{
    gate_shut();
    if (gate_wait_until_empty(end_ms)) return true;
    gate_open();
    return false;
}

void gate_permit(uint32_t calls)
{
    uint64_t now = atomic_load(&passage);
    while (!atomic_compare_exchange_weak(&passage, &now, now - LEFT(now) + calls)) continue;
    if (calls > 0) wake_at_closed_gate();
}

static uint32_t count_inside(void)
{
    uint32_t inside = 0;
    for (size_t n = 0; n < GATE_STRIPES; n++) inside += (uint32_t)atomic_load(&stripes[n].inside);
    return inside;
}

struct gate_count gate_count(void)
{
    uint64_t now = atomic_load(&passage);
    struct gate_count count = {.passed = (uint32_t)(now / ONE_PASSED), .left = (uint32_t)LEFT(now)};
    count.inside = count_inside();
    count.waiting = atomic_load(&waiting);
    return count;
}

/* Said first, looked after: a call that shuns it looks after it is counted inside. */
bool gate_begin_synchronising(void)
{
    atomic_store(&is_synchronising, true);
    if (count_inside() == 0) return true;
    gate_synchronising_ended();
    return false;
}

void gate_synchronising_ended(void)
{
    atomic_store(&is_synchronising, false);
    if (LEFT(atomic_load(&passage)) != 0) wake_at_closed_gate();
}

void gate_after_fork_in_child(void)
{
    atomic_store(&gate_is_there, false);
    atomic_store(&gate_is_closed, 0);
    atomic_store(&passage, 0);
    atomic_store(&waiting, 0);
    atomic_store(&is_synchronising, false);
    for (size_t n = 0; n < GATE_STRIPES; n++) atomic_store(&stripes[n].inside, 0);
    if (gate_thread.depth > 0) atomic_store(&gate_thread.stripe->inside, 1);
}
