/* Brings the process to rest: no capture going on, nobody inside the gate, all work of all contexts done.
 *
 * Either at once, for a process whose work ends by itself. Or in two steps, for one of several whose work waits for the
 * others: halt closes the gate and waits for nothing, halt_let_pass lets calls through, until all of them are idle.
 * Used by the helper thread alone.
 */
#ifndef VGPU_QUIESCE_H
#define VGPU_QUIESCE_H

#include <stdbool.h>
#include <stdint.h>

#include "staging_frames.h"

struct rest_times {
    int64_t waited_ms; /* until the gate was closed and empty */
    int64_t sync_ms;
};

/* From the open gate, or from the halted one. On success the gate is closed; on a fault it is open. */
struct fault quiesce(int64_t deadline_ms, bool is_halted, struct rest_times *times);

/* Closes the gate when no stream is being captured. On a fault it is open. */
struct fault halt(int64_t deadline_ms);

struct passages {
    uint32_t passed; /* since halt */
    uint32_t waiting;
    uint32_t inside;
    bool is_capturing;
    bool is_idle; /* nobody inside, nothing captured, all work of the calls that passed is done */
};

/* Lets up to `calls` more calls through the halted gate, and waits until the process is idle or waits for others, but no
 * longer than `wait_ms`. On a fault the gate is open. */
struct fault halt_let_pass(uint32_t calls, int64_t wait_ms, struct passages *passages);

/* Opens the gate, halted or at rest. */
void quiesce_end(void);

void quiesce_after_fork_in_child(void);

#endif
