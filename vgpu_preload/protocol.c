#include "protocol.h"

#include "json_writer.h"

static void put_little_endian(unsigned char *at, uint32_t value, int size)
{
    for (int n = 0; n < size; n++) at[n] = (unsigned char)(value >> (8 * n));
}

static uint32_t little_endian(const unsigned char *at, int size)
{
    uint32_t value = 0;
    for (int n = 0; n < size; n++) value |= (uint32_t)at[n] << (8 * n);
    return value;
}

void frame_write(unsigned char header[FRAME_HEADER_SIZE], const struct frame *frame)
{
    put_little_endian(header, FRAME_MAGIC, 4);
    put_little_endian(header + 4, frame->version, 2);
    put_little_endian(header + 6, frame->type, 2);
    put_little_endian(header + 8, frame->payload_size, 4);
    put_little_endian(header + 12, frame->sequence, 4);
}

bool frame_read(struct frame *frame, const unsigned char header[FRAME_HEADER_SIZE])
{
    frame->version = (uint16_t)little_endian(header + 4, 2);
    frame->type = (uint16_t)little_endian(header + 6, 2);
    frame->payload_size = little_endian(header + 8, 4);
    frame->sequence = little_endian(header + 12, 4);
    uint32_t most = frame->version == 2 ? FRAME_MOST_PAYLOAD_STAGED : FRAME_MOST_PAYLOAD;
    return little_endian(header, 4) == FRAME_MAGIC && (frame->version == 1 || frame->version == 2) &&
           frame->payload_size <= most;
}

void uuid_text(const CUuuid *uuid, char text[41])
{
    static const char digits[] = "0123456789abcdef";
    char *at = text;
    *at++ = 'G', *at++ = 'P', *at++ = 'U';
    for (int n = 0; n < 16; n++) {
        if (n == 0 || n == 4 || n == 6 || n == 8 || n == 10) *at++ = '-';
        *at++ = digits[uuid->bytes[n] >> 4];
        *at++ = digits[uuid->bytes[n] & 0xf];
    }
    *at = '\0';
}

static void write_devices(struct json_writer *json, const struct device_facts *facts)
{
    for (int n = 0; n < facts->device_count; n++) {
        char uuid[41];
        uuid_text(&facts->devices[n].uuid, uuid);
        json_raw(json, n == 0 ? "{\"ordinal\":" : ",{\"ordinal\":");
        json_integer(json, facts->devices[n].ordinal);
        json_raw(json, ",\"uuid\":");
        json_string(json, uuid);
        json_raw(json, "}");
    }
}

static void write_staged(struct json_writer *json, const struct hello_staged *staged)
{
    json_raw(json, "],\"mode\":\"staged\",\"protocol\":2,\"minor\":");
    json_integer(json, PROTOCOL_MINOR);
    json_raw(json, ",\"phase\":");
    json_string(json, staged->phase);
    json_raw(json, ",\"held\":{\"objects\":");
    json_integer(json, (long)staged->objects);
    json_raw(json, ",\"bytes\":");
    json_integer(json, (long)staged->bytes);
    json_raw(json, ",\"driver_bytes\":");
    json_integer(json, (long)staged->driver_bytes);
    json_raw(json, "}}");
}

size_t hello_write(const struct hello *hello, const struct hello_staged *staged, char *buffer, size_t size)
{
    struct json_writer json = {.start = buffer, .at = buffer, .end = buffer + size};
    json_raw(&json, "{\"pid\":");
    json_integer(&json, hello->pid);
    json_raw(&json, ",\"ns_tid\":");
    json_integer(&json, hello->helper_tid);
    json_raw(&json, ",\"comm\":");
    json_string(&json, hello->comm);
    json_raw(&json, ",\"build_id\":");
    json_string(&json, hello->build_id);
    json_raw(&json, ",\"libc\":");
    json_string(&json, hello->libc);
    json_raw(&json, ",\"driver_version\":");
    json_integer(&json, hello->facts.driver_version);
    json_raw(&json, ",\"devices\":[");
    write_devices(&json, &hello->facts);
    if (staged == NULL)
        json_raw(&json, "],\"mode\":\"driver\"}");
    else
        write_staged(&json, staged);
    return json.overflow ? 0 : (size_t)(json.at - json.start);
}
