#include "json_reader.h"

#include <string.h>

static void skip_space(struct json_text *text)
{
    while (text->at < text->end && (*text->at == ' ' || *text->at == '\t' || *text->at == '\n' || *text->at == '\r'))
        text->at++;
}

static bool take(struct json_text *text, char byte)
{
    skip_space(text);
    if (text->at == text->end || *text->at != byte) return false;
    text->at++;
    return true;
}

/* The bytes between the quotes, escapes as they are. */
static bool take_string(struct json_text *text, struct json_text *content)
{
    if (!take(text, '"')) return false;
    content->at = text->at;
    for (; text->at < text->end && *text->at != '"'; text->at++)
        if (*text->at == '\\' && ++text->at == text->end) return false;
    content->end = text->at;
    return take(text, '"');
}

/* Over one value of any kind. Brackets are counted and not matched by kind: what is stepped over is not believed. */
static bool skip_value(struct json_text *text)
{
    struct json_text content;
    unsigned int depth = 0;
    skip_space(text);
    while (text->at < text->end) {
        char byte = *text->at;
        if (byte == '"') {
            if (!take_string(text, &content)) return false;
            continue;
        }
        if (depth == 0 && (byte == ',' || byte == '}' || byte == ']')) return true;
        if (byte == '{' || byte == '[') depth++;
        if (byte == '}' || byte == ']') depth--;
        text->at++;
    }
    return depth == 0;
}

static bool is_name(struct json_text content, const char *name)
{
    size_t size = strlen(name);
    return (size_t)(content.end - content.at) == size && memcmp(content.at, name, size) == 0;
}

bool json_member(struct json_text object, const char *name, struct json_text *value)
{
    struct json_text key;
    if (!take(&object, '{')) return false;
    do {
        if (!take_string(&object, &key) || !take(&object, ':')) return false;
        skip_space(&object);
        *value = object;
        if (!skip_value(&object)) return false;
        value->end = object.at;
        if (is_name(key, name)) return true;
    } while (take(&object, ','));
    return false;
}

bool json_is_null(struct json_text value)
{
    return value.end - value.at >= 4 && memcmp(value.at, "null", 4) == 0;
}

bool json_is_true(struct json_text value)
{
    return value.end - value.at >= 4 && memcmp(value.at, "true", 4) == 0;
}

bool json_read_integer(struct json_text *value, uint64_t *integer)
{
    uint64_t result = 0;
    skip_space(value);
    const char *start = value->at;
    for (; value->at < value->end && *value->at >= '0' && *value->at <= '9'; value->at++)
        if (__builtin_mul_overflow(result, 10, &result) ||
            __builtin_add_overflow(result, (uint64_t)(*value->at - '0'), &result))
            return false;
    *integer = result;
    return value->at > start;
}

bool json_enter_array(struct json_text *value)
{
    return take(value, '[');
}

bool json_next_integer(struct json_text *value, uint64_t *integer)
{
    skip_space(value);
    if (!json_read_integer(value, integer)) return false;
    take(value, ',');
    return true;
}

bool json_is_array_end(struct json_text value)
{
    return take(&value, ']');
}
