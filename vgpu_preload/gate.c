#define _GNU_SOURCE
#include "gate.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"

#define DRAIN_POLL_US 20

_Atomic(bool) gate_is_there;
_Atomic(uint32_t) gate_is_closed;
_Thread_local struct gate_thread gate_thread;

static struct gate_stripe stripes[GATE_STRIPES];
static _Atomic(unsigned int) threads_seen;

void gate_choose_stripe(void)
{
    gate_thread.stripe = &stripes[atomic_fetch_add(&threads_seen, 1) % GATE_STRIPES];
}

static long futex(int operation, uint32_t value)
{
    return syscall(SYS_futex, &gate_is_closed, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

void gate_wait_and_enter(struct gate_stripe *stripe)
{
    do {
        atomic_fetch_sub(&stripe->inside, 1);
        while (atomic_load(&gate_is_closed) != 0) futex(FUTEX_WAIT, 1);
        atomic_fetch_add(&stripe->inside, 1);
    } while (atomic_load(&gate_is_closed) != 0);
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

bool gate_close(int64_t end_ms)
{
    atomic_store(&gate_is_closed, 1);
    for (size_t n = 0; n < GATE_STRIPES; n++)
        while (atomic_load(&stripes[n].inside) != 0) {
            if (clock_now_ms() >= end_ms) {
                gate_open();
                return false;
            }
            clock_sleep_us(DRAIN_POLL_US);
        }
    return true;
}

void gate_after_fork_in_child(void)
{
    atomic_store(&gate_is_there, false);
    atomic_store(&gate_is_closed, 0);
    for (size_t n = 0; n < GATE_STRIPES; n++) atomic_store(&stripes[n].inside, 0);
    if (gate_thread.depth > 0) atomic_store(&gate_thread.stripe->inside, 1);
}
