/* INVENTORY: what this process holds, what the driver holds for it, and what stands in the way. */
#ifndef VGPU_INVENTORY_H
#define VGPU_INVENTORY_H

#include "staging_frames.h"

bool answer_inventory(const struct request *request, const struct device_facts *facts);

/* The first thing that forbids to take memory away, as a fault: what cannot be followed, and memory of other processes,
 * unless that is to go too and can come back. */
struct fault obstacle_to_release(bool takes_imports);

#endif
