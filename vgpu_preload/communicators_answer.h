/* COMMUNICATORS: what the communicators of NCCL and NVSHMEM's element of this process are. Asks neither library, because
 * the application may be in a call of theirs; it may be asked in any phase. */
#ifndef VGPU_COMMUNICATORS_ANSWER_H
#define VGPU_COMMUNICATORS_ANSWER_H

#include "staging_frames.h"

bool answer_communicators(const struct request *request);

#endif
