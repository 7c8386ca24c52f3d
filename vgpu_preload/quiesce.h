/* Brings the process to rest: no capture going on, nobody inside the gate, all work of all contexts done.
 *
 * cuCtxSynchronize cannot be cancelled. So a thread of its own does it, and the helper waits for that thread as long as
 * the deadline allows. When the time is over the gate opens again and the thread is left to end by itself, whenever the
 * driver lets it; until then no new attempt is made. The thread is started before the gate closes, because starting one
 * allocates from the application's heap.
 */
#ifndef VGPU_QUIESCE_H
#define VGPU_QUIESCE_H

#include <stdint.h>

#include "staging_frames.h"

struct rest_times {
    int64_t waited_ms; /* until the gate was closed and empty */
    int64_t sync_ms;
};

/* On success the gate is closed; on a fault it is open. */
struct fault quiesce(int64_t deadline_ms, struct rest_times *times);

void quiesce_after_fork_in_child(void);

#endif
