/* Frames of the control socket and the HELLO that names this process (spec/preload-protocol.md). Pure: bytes only. */
#ifndef VGPU_PROTOCOL_H
#define VGPU_PROTOCOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device_facts.h"
#include "loaded_objects.h"

#define FRAME_MAGIC 0x55504756U
#define PROTOCOL_MINOR 2 /* of version 2: HALT, LET_PASS, COMMUNICATORS, and imports that go and come back */
#define FRAME_HEADER_SIZE 16
#define FRAME_MOST_PAYLOAD 65536U            /* version 1 */
#define FRAME_MOST_PAYLOAD_STAGED (8U << 20) /* version 2 */

enum frame_type {
    FRAME_HELLO = 1,
    FRAME_WELCOME = 2,
    FRAME_DETACH = 3,
    FRAME_DETACHED = 4,
    FRAME_PING = 5,
    FRAME_PONG = 6,
    FRAME_INVENTORY = 10,
    FRAME_INVENTORY_IS = 11,
    FRAME_EXPORT = 12,
    FRAME_EXPORTED = 13,
    FRAME_REST = 14,
    FRAME_RESTED = 15,
    FRAME_RELEASE = 16,
    FRAME_RELEASED = 17,
    FRAME_MAP = 18,
    FRAME_MAPPED = 19,
    FRAME_OPEN = 20,
    FRAME_FAILED = 21,
    FRAME_FDS = 22,
    FRAME_OPENED = 23,
    FRAME_SHARES = 24,
    FRAME_SHARES_ARE = 25,
    FRAME_HALT = 26,
    FRAME_HALTED = 27,
    FRAME_LET_PASS = 28,
    FRAME_PASSED = 29,
    FRAME_COMMUNICATORS = 30,
    FRAME_COMMUNICATORS_ARE = 31,
};

struct frame {
    uint16_t version;
    uint16_t type;
    uint32_t payload_size;
    uint32_t sequence;
};

struct hello {
    long pid;
    long helper_tid;
    char comm[16];
    char build_id[BUILD_ID_HEX_SIZE];
    const char *libc;
    struct device_facts facts;
    bool is_staged;
};

/* What a staged process says about itself beside the rest. */
struct hello_staged {
    const char *phase;
    uint64_t objects;
    uint64_t bytes;
    uint64_t driver_bytes;
};

void frame_write(unsigned char header[FRAME_HEADER_SIZE], const struct frame *frame);

/* False when the header breaks the protocol, after which the connection cannot be used. */
bool frame_read(struct frame *frame, const unsigned char header[FRAME_HEADER_SIZE]);

/* Writes the payload of HELLO; gives its size, 0 when it does not fit. `staged`: NULL in driver mode. */
size_t hello_write(const struct hello *hello, const struct hello_staged *staged, char *buffer, size_t size);

/* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", the form nvidia-smi prints. */
void uuid_text(const CUuuid *uuid, char text[41]);

#endif
