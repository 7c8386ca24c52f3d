/* The gate at the entry of every call that submits work or changes memory.
 *
 * Open, it counts who is inside: a thread adds one to a counter, looks whether the gate is closed, and takes it off
 * again when the call returns. There are many counters, each in cache lines of its own, so that threads do not meet on
 * one. The helper closes the gate and then waits until each counter has been seen at zero: who adds after the closing
 * sees it, goes back out and sleeps. Nothing here takes a lock or allocates, and no signal is used.
 *
 * Until the process is in staged mode the gate is not there: a passage is one comparison.
 */
#ifndef VGPU_GATE_H
#define VGPU_GATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GATE_STRIPES 64
#define CACHE_LINES_TOGETHER 128 /* neighbouring lines are fetched in pairs */

struct gate_stripe {
    _Atomic(int32_t) inside;
} __attribute__((aligned(CACHE_LINES_TOGETHER)));

struct gate_thread {
    struct gate_stripe *stripe;
    unsigned int depth; /* a driver call may come back to us through another interposer */
};

extern _Atomic(bool) gate_is_there;
extern _Atomic(uint32_t) gate_is_closed;
extern _Thread_local struct gate_thread gate_thread;

void gate_choose_stripe(void);
void gate_wait_and_enter(struct gate_stripe *stripe);

static inline bool gate_enter(void)
{
    if (!atomic_load_explicit(&gate_is_there, memory_order_relaxed)) return false;
    if (gate_thread.depth++ > 0) return true;
    if (gate_thread.stripe == NULL) gate_choose_stripe();
    atomic_fetch_add(&gate_thread.stripe->inside, 1);
    if (__builtin_expect(atomic_load(&gate_is_closed) != 0, 0)) gate_wait_and_enter(gate_thread.stripe);
    return true;
}

static inline void gate_leave(const bool *entered)
{
    if (*entered && --gate_thread.depth == 0) atomic_fetch_sub(&gate_thread.stripe->inside, 1);
}

/* Enters the gate for the rest of the block. */
#define PASS_GATE() __attribute__((cleanup(gate_leave), unused)) const bool entered_gate = gate_enter()

/* Puts the gate there, open. */
void gate_build(void);

/* Closes it and waits until nobody is inside; false: the time was over, and the gate is open again. */
bool gate_close(int64_t end_ms);

void gate_open(void);

/* A forked child starts without a gate; only the thread that forked is left. */
void gate_after_fork_in_child(void);

#endif
