/* What this process takes from others: memory opened with cuIpcOpenMemHandle from a process that has this library too.
 *
 * The exporter's service gives a descriptor; the memory is imported, mapped at an address of its own and counted as
 * often as it is opened in one context, as the driver counts. Closing is allocation_close.
 */
#ifndef VGPU_OPENINGS_H
#define VGPU_OPENINGS_H

#include "share_handle.h"

/* cuIpcOpenMemHandle for a handle of ours, in staged mode; passes the gate by itself. */
CUresult opening_make(CUdeviceptr *address, const struct share_handle *handle, unsigned int flags);

#endif
