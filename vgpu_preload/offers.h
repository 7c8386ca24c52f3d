/* What this process gives to others: memory by descriptor (cuMemExportToShareableHandle) and by legacy IPC handle.
 *
 * All that get one object get the same open file, so that the agent can tell by it who shares what; we keep one number
 * of that file as long as the object lives.
 */
#ifndef VGPU_OFFERS_H
#define VGPU_OFFERS_H

#include <stdbool.h>

#include "objects.h"
#include "share_wire.h"

/* cuIpcGetMemHandle. False: the address is in no memory that we have backed. */
bool offer_by_handle(CUdeviceptr address, CUipcMemHandle *bytes, CUresult *rc);

/* The service's question: what the request names, if its secret is right. The descriptor is loose. */
void offer_give(const struct share_request *request, int process, struct share_reply *reply, int *descriptor);

/* One more descriptor of what was given away before; false: there is none, the driver has to make it. */
bool offer_by_descriptor_again(CUmemGenericAllocationHandle token, int *descriptor);

/* The application gave it away; `descriptor` is what it got, -1: something else than a descriptor. */
void offer_made(CUmemGenericAllocationHandle token, int descriptor);

#endif
