/* What the helper thread does all its life: keep this process registered with the node agent. */
#ifndef VGPU_AGENT_LINK_H
#define VGPU_AGENT_LINK_H

#include "protocol.h"

/* Returns only when the helper is the last thread of the process. `hello` stays the caller's. */
void agent_link_run(const struct hello *hello);

#endif
