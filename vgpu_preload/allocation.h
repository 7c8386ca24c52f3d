/* Device allocations of 2 MiB and more on memory that another process can be given: create, map, free, close.
 *
 * What fails here falls back to the driver's own allocation, so an application never fails because of us, and gets the
 * driver's own error codes when there is no memory.
 */
#ifndef VGPU_ALLOCATION_H
#define VGPU_ALLOCATION_H

#include <stdbool.h>

#include "objects.h"

/* False: not done, ask the driver. */
bool allocation_make(CUdeviceptr *address, size_t bytes);

/* The same for a pitch that the driver chooses. */
bool allocation_make_pitched(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element);

/* False: not ours, ask the driver. Waits for the work of the context, as cuMemFree does. While a stream is captured,
 * waiting would spoil the capture: the memory then goes when the capture has ended. */
bool allocation_free(CUdeviceptr address, CUresult *rc);

/* The same for memory that was opened from another process, with cuIpcCloseMemHandle: it goes with the last closing. */
bool allocation_close(CUdeviceptr address, CUresult *rc);

/* Frees what waits for the end of captures. */
void allocations_free_waiting(void);

/* After the end of a context: what was allocated in it goes. */
void allocations_free_context(CUcontext context);

/* Everything that a context or the end of one brings with it. */
void context_ended(CUcontext context);

void allocations_forget_all(void);

#endif
