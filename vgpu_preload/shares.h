/* SHARES: what this process shares with others, with the open file that tells the agent with whom. */
#ifndef VGPU_SHARES_H
#define VGPU_SHARES_H

#include "staging_frames.h"

bool answer_shares(const struct request *request, const struct device_facts *facts);

#endif
