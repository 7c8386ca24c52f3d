/* The 64 bytes of a legacy IPC handle that this library gives out, as programs carry them from process to process.
 *
 * It names one object of one process and holds a secret of that object: who has the handle may have the memory, as with
 * the driver's own. The same allocation always gives the same bytes, because programs use them as a key. Pure; the
 * layout is written in spec/preload-protocol.md, "Memory shared by legacy handles".
 */
#ifndef VGPU_SHARE_HANDLE_H
#define VGPU_SHARE_HANDLE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

#define SHARE_NAME_BYTES 16
#define SHARE_SECRET_BYTES 16

struct share_handle {
    unsigned char name[SHARE_NAME_BYTES]; /* of the exporting process's service */
    unsigned char secret[SHARE_SECRET_BYTES];
    uint64_t object;
    int32_t process; /* the exporter and the thread of its service, in its pid namespace */
    int32_t thread;
};

void share_handle_write(const struct share_handle *handle, CUipcMemHandle *bytes);

/* False: not ours, or damaged. */
bool share_handle_read(struct share_handle *handle, const CUipcMemHandle *bytes);

/* Whether both name the same object. */
bool share_handle_is_same(const struct share_handle *one, const struct share_handle *other);

/* Takes the same time wherever they differ. */
bool share_secret_is_same(const unsigned char *one, const unsigned char *other);

#endif
