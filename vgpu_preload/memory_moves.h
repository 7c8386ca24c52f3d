/* Giving memory to the agent, letting go of it, and taking it back at the old addresses. The helper thread's alone. */
#ifndef VGPU_MEMORY_MOVES_H
#define VGPU_MEMORY_MOVES_H

#include "staging_frames.h"

/* EXPORT: one descriptor for each object, while the application goes on. */
bool answer_export(const struct request *request);

/* RELEASE: everything unmapped and released, addresses kept; with the memory of other processes or without. May be tried
 * again after a fault. */
struct fault release_all(bool with_imports);

/* FDS: keeps what came until MAP. */
bool take_descriptors_of(const struct request *request);

/* MAP: the objects and imports of the list, from the descriptors that came. What is mapped already stays. */
struct fault map_objects(struct object_walk *walk);

/* An object or import whose memory is away, as a fault. */
struct fault first_missing(void);

/* In a forked child: the descriptors of the parent's memory would keep it alive. */
void descriptors_give_up(void);

#endif
