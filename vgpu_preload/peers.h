/* Peer access: cuCtxEnablePeerAccess opens all memory of another device, so it must open what we put on VMM memory too.
 *
 * Counted by pairs of devices, not of contexts: what more is allowed than asked for would only have been an error.
 */
#ifndef VGPU_PEERS_H
#define VGPU_PEERS_H

#include "cuda_abi.h"

/* The current context of the caller may now use the memory of the other context's device, or may not any more. */
void peers_enabled(CUcontext other);
void peers_disabled(CUcontext other);

/* Opens a new allocation to the devices that have access to its device. */
void peers_admit(CUdeviceptr address);

void peers_forget_all(void);

#endif
