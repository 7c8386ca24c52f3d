/* The thread that waits for the work on the devices, so that the helper need not: cuCtxSynchronize cannot be cancelled.
 *
 * It is started before the gate closes, because starting a thread allocates from the application's heap, and parks until
 * it is asked. When it is dismissed while the driver holds it, it ends by itself, whenever the driver lets it; until
 * then no other is started. Used by the helper thread alone.
 */
#ifndef VGPU_SYNCHRONISER_H
#define VGPU_SYNCHRONISER_H

#include <stdbool.h>
#include <stdint.h>

#include "staging_frames.h"

/* On success it is parked. */
struct fault synchroniser_start(int64_t end_ms);

/* Every context that the process uses, once. Only when it is parked. */
void synchroniser_ask(void);

/* True: it is parked again, and `rc` is what the last asking gave. */
bool synchroniser_is_done(CUresult *rc);
bool synchroniser_wait(int64_t end_ms, CUresult *rc);

/* It is of no more use; nothing when it is not there. */
void synchroniser_dismiss(void);

/* False: it has not ended in time. */
bool synchroniser_wait_for_end(int64_t end_ms);

void synchroniser_after_fork_in_child(void);

#endif
