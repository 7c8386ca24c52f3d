/* Frames of the control socket and the HELLO that names this process (spec/preload-protocol.md). Pure: bytes only. */
#ifndef VGPU_PROTOCOL_H
#define VGPU_PROTOCOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device_facts.h"
#include "loaded_objects.h"

#define FRAME_MAGIC 0x55504756U
#define PROTOCOL_VERSION 1
#define FRAME_HEADER_SIZE 16
#define FRAME_MOST_PAYLOAD 65536U

enum frame_type {
    FRAME_HELLO = 1,
    FRAME_WELCOME = 2,
    FRAME_DETACH = 3,
    FRAME_DETACHED = 4,
    FRAME_PING = 5,
    FRAME_PONG = 6,
};

struct frame {
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
};

void frame_write(unsigned char header[FRAME_HEADER_SIZE], const struct frame *frame);

/* False when the header breaks the protocol, after which the connection cannot be used. */
bool frame_read(struct frame *frame, const unsigned char header[FRAME_HEADER_SIZE]);

/* Writes the payload of HELLO; gives its size, 0 when it does not fit. */
size_t hello_write(const struct hello *hello, char *buffer, size_t size);

#endif
