#include "json_writer.h"

static void put(struct json_writer *json, char byte)
{
    if (json->at == json->end)
        json->overflow = true;
    else
        *json->at++ = byte;
}

void json_raw(struct json_writer *json, const char *text)
{
    for (; *text != '\0'; text++) put(json, *text);
}

void json_integer(struct json_writer *json, long value)
{
    char digits[24];
    int count = 0;
    unsigned long rest = value < 0 ? 0UL - (unsigned long)value : (unsigned long)value;
    do {
        digits[count++] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest != 0);
    if (value < 0) put(json, '-');
    while (count > 0) put(json, digits[--count]);
}

static bool continues(const unsigned char *byte)
{
    return (*byte & 0xc0) == 0x80;
}

/* Length of the valid UTF-8 sequence at `byte`, 0 when there is none. Overlong forms, surrogates and what lies above
 * U+10FFFF are refused (RFC 3629 section 4). */
static int sequence_length(const unsigned char *byte)
{
    unsigned char first = byte[0], second_low = 0x80, second_high = 0xbf;
    if (first < 0x80) return 1;
    if (first >= 0xc2 && first <= 0xdf) return continues(byte + 1) ? 2 : 0;
    if (first == 0xe0 || first == 0xf0) second_low = first == 0xe0 ? 0xa0 : 0x90;
    if (first == 0xed || first == 0xf4) second_high = first == 0xed ? 0x9f : 0x8f;
    if (first < 0xe0 || first > 0xf4 || byte[1] < second_low || byte[1] > second_high || !continues(byte + 2)) return 0;
    if (first < 0xf0) return 3;
    return continues(byte + 3) ? 4 : 0;
}

static void put_control(struct json_writer *json, unsigned char byte)
{
    static const char digits[] = "0123456789abcdef";
    json_raw(json, "\\u00");
    put(json, digits[byte >> 4]);
    put(json, digits[byte & 0xf]);
}

void json_string(struct json_writer *json, const char *text)
{
    const unsigned char *byte = (const unsigned char *)text;
    put(json, '"');
    while (*byte != '\0') {
        int length = sequence_length(byte);
        if (length == 0) {
            json_raw(json, "\\ufffd");
            byte++;
        } else if (*byte < 0x20 || *byte == 0x7f) {
            put_control(json, *byte++);
        } else {
            if (*byte == '"' || *byte == '\\') put(json, '\\');
            while (length-- > 0) put(json, (char)*byte++);
        }
    }
    put(json, '"');
}
