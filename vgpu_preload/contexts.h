/* Which contexts this process uses, and which streams are being captured.
 *
 * Noted where an application makes, takes or chooses a context, because nothing lists them afterwards. The helper
 * synchronises each of them before memory is taken away.
 */
#ifndef VGPU_CONTEXTS_H
#define VGPU_CONTEXTS_H

#include <stdbool.h>

#include "cuda_abi.h"

#define MOST_CONTEXTS 1024

/* Cheap when the thread noted the same one last. */
void context_note(CUcontext context);
void context_forget(CUcontext context);

/* Copies all that are known; gives their number. */
unsigned int contexts_copy(CUcontext contexts[MOST_CONTEXTS]);

/* The primary context of a device, by what cuDevicePrimaryCtxRetain gave. */
void context_note_primary(CUdevice device, CUcontext context);
CUcontext context_primary(CUdevice device);

void capture_begun(CUstream stream);
void capture_ended(CUstream stream, CUresult rc);
void capture_stream_gone(CUstream stream);

/* True when some stream may be in a capture; costs one load. */
bool capture_is_active(void);

/* Asks the driver about each stream and forgets those whose capture ended without our notice. */
void captures_check(void);

void contexts_forget_all(void);

#endif
