/* What importer and exporter of shared memory say to each other (spec/preload-protocol.md, "Memory shared by legacy
 * handles"): one message asks, one message and one descriptor answer. The sockets have abstract names, which everybody
 * in the network namespace can list; so each side looks at the other's user, and the secret of the handle decides.
 */
#ifndef VGPU_SHARE_WIRE_H
#define VGPU_SHARE_WIRE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "share_handle.h"

#define SHARE_THREAD_NAME "vgpu-share"

struct share_request {
    uint64_t magic;
    uint64_t object;
    unsigned char secret[SHARE_SECRET_BYTES];
};

enum share_status { SHARE_GIVEN, SHARE_GONE, SHARE_DENIED };

struct share_reply {
    uint64_t magic;
    uint32_t status;
    uint32_t zero;
    uint64_t size;      /* of the memory */
    uint64_t requested; /* of the allocation in it */
};

#define SHARE_REQUEST_MAGIC 0x314b534155504756ULL /* the bytes "VGPUASK1" */
#define SHARE_REPLY_MAGIC 0x3156494755504756ULL   /* "VGPUGIV1" */

/* The address of the service with this name; gives its length. */
socklen_t share_address(const unsigned char name[SHARE_NAME_BYTES], struct sockaddr_un *address);

/* True when the process at the other end has our user or is root. */
bool share_peer_is_trusted(int socket, int *process);

#endif
