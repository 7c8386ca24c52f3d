/* The staged side of the protocol: what the helper thread does with the memory of this process when the agent asks.
 *
 * Phases: open -> (halted, where calls pass by permits ->) rested (gate closed, all work done) -> released (memory given
 * back) -> open. Only OPEN leads from released to open; whoever takes the memory away has to bring it back. A process
 * halted or at rest whose agent is gone opens its gate itself, because nothing of it is missing.
 */
#ifndef VGPU_STAGING_H
#define VGPU_STAGING_H

#include <stdbool.h>
#include <stddef.h>

#include "protocol.h"

/* Finds what is needed; false: this process stays with the driver. */
bool staging_prepare(struct device_facts *facts, const void *driver_function);

/* From here on allocations are ours and calls pass the gate. */
void staging_begin(void);
void staging_give_up(void);
void staging_after_fork_in_child(void);

/* Only the helper thread calls what follows. */

void staging_hello(struct hello_staged *hello);

/* Answers a frame. `descriptors` came with it and are open only for FDS, which takes them over. False: the connection
 * is of no more use. */
bool staging_answer(const struct frame *frame, const char *payload, const int *descriptors, size_t count);

/* The connection ended without DETACH, or nobody came after one. */
void staging_agent_is_gone(void);

/* True while descriptors may come that the limit of open files would not let in. */
bool staging_expects_descriptors(void);

#endif
