/* The gate at the entry of every call that submits work or changes memory.
 *
 * Open, it counts who is inside: a thread adds one to a counter, looks whether the gate is closed, and takes it off
 * again when the call returns. There are many counters, each in cache lines of its own, so that threads do not meet on
 * one. The helper closes the gate and then waits until each counter has been seen at zero: who adds after the closing
 * sees it, goes back out and sleeps. Nothing here takes a lock or allocates, and no signal is used.
 *
 * A closed gate lets calls through by permits: a counted number of them, whoever comes first. What a passage costs more
 * then is paid at a closed gate only.
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
    bool shuns_sync;    /* what it is about to call must not meet cuCtxSynchronize of another thread */
};

extern _Atomic(bool) gate_is_there;
extern _Atomic(uint32_t) gate_is_closed; /* 0: open. Every other value: closed, a new one for each wake-up */
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

/* The same for a call that begins a capture or ends a context. Synchronising a context spoils its captures (measured on
 * the real driver: 900, and 901 for the capture), and must not meet its end; so a permit lets these through only while
 * nothing is being synchronised. Launches do go on beside a cuCtxSynchronize that waits (measured too). */
#define PASS_GATE_APART() \
    gate_thread.shuns_sync = true; \
    PASS_GATE(); \
    gate_thread.shuns_sync = false

/* Puts the gate there, open. */
void gate_build(void);

/* Closes it and waits until nobody is inside; false: the time was over, and the gate is open again. */
bool gate_close(int64_t end_ms);

void gate_open(void);

/* What follows is for the helper thread, at a closed gate. */

/* Closes it and does not wait; nobody has passed yet. */
void gate_shut(void);

/* False: the time was over; the gate stays as it is. */
bool gate_wait_until_empty(int64_t end_ms);

/* So many more calls may pass; what is left of earlier permits is void. */
void gate_permit(uint32_t calls);

/* Who is where. `passed` and `left` are older than `inside`: whoever passed is counted inside before he is counted as
 * passed, so with nobody inside the calls up to `passed` have returned. */
struct gate_count {
    uint32_t passed; /* since the gate was shut */
    uint32_t left;   /* permits */
    uint32_t inside;
    uint32_t waiting;
};
struct gate_count gate_count(void);

/* True: somebody is about to synchronise, and no call that shuns it is inside or will get in until
 * gate_synchronising_ended. False: somebody is inside. */
bool gate_begin_synchronising(void);
void gate_synchronising_ended(void);

/* A forked child starts without a gate; only the thread that forked is left. */
void gate_after_fork_in_child(void);

#endif
