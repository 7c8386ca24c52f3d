/* Asks another process's service for the memory that a handle names. */
#ifndef VGPU_SHARE_FETCH_H
#define VGPU_SHARE_FETCH_H

#include "share_wire.h"

enum fetch_end {
    FETCHED,
    FETCH_AGAIN,   /* the exporter lives and does not answer now: it is stopped, or its memory is away */
    FETCH_GONE,    /* the exporter has ended */
    FETCH_REFUSED, /* the memory is freed, the secret is wrong or the user is another */
};

/* Waits a second at most. The descriptor is loose. */
enum fetch_end share_fetch(const struct share_handle *handle, struct share_reply *reply, int *descriptor);

#endif
