#define _GNU_SOURCE
#include "share_fetch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "descriptors.h"
#include "loose_descriptors.h"

#define ANSWER_DEADLINE_MS 1000
#define MOST_BYTES (1ULL << 47)

static char *put(char *at, const char *text)
{
    while (*text != '\0') *at++ = *text++;
    return at;
}

static char *put_number(char *at, int number)
{
    char digits[12];
    int count = 0;
    do digits[count++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    while (count > 0) *at++ = digits[--count];
    return at;
}

/* True while the thread that serves the handle exists. After an exec or the end of the exporter it does not. */
static bool exporter_lives(const struct share_handle *handle)
{
    char path[64], comm[sizeof SHARE_THREAD_NAME] = "";
    if (handle->process <= 0 || handle->thread <= 0) return false;
    char *at = put(put_number(put(path, "/proc/"), handle->process), "/task/");
    *put(put_number(at, handle->thread), "/comm") = '\0';
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    ssize_t size = read(file, comm, sizeof comm);
    close(file);
    return size == sizeof comm && memcmp(comm, SHARE_THREAD_NAME "\n", sizeof comm) == 0;
}

static enum fetch_end not_now(const struct share_handle *handle)
{
    return exporter_lives(handle) ? FETCH_AGAIN : FETCH_GONE;
}

static bool connect_to(int socket, const struct share_handle *handle)
{
    struct sockaddr_un address;
    int process;
    socklen_t length = share_address(handle->name, &address);
    return connect(socket, (struct sockaddr *)&address, length) == 0 && share_peer_is_trusted(socket, &process);
}

static bool ask(int socket, const struct share_handle *handle)
{
    struct share_request request = {.magic = SHARE_REQUEST_MAGIC, .object = handle->object};
    memcpy(request.secret, handle->secret, sizeof request.secret);
    return loose_send(socket, &request, sizeof request, -1) == sizeof request;
}

/* False: the time is over, or the connection was given up. */
static bool receive(int socket, struct share_reply *reply, int *descriptor)
{
    int64_t end = clock_now_ms() + ANSWER_DEADLINE_MS, left;
    while ((left = end - clock_now_ms()) > 0) {
        struct pollfd wanted = {.fd = socket, .events = POLLIN};
        poll(&wanted, 1, (int)left);
        if (!loose_is_ours(socket)) return false;
        ssize_t size = loose_receive(socket, reply, sizeof *reply, descriptor);
        if (size == sizeof *reply) return reply->magic == SHARE_REPLY_MAGIC;
        if (size >= 0 || (errno != EAGAIN && errno != EINTR)) return false;
    }
    return false;
}

/* The other side is a process like any other: what it says about sizes is looked at before it is used. */
static bool is_sound(const struct share_reply *reply, int descriptor)
{
    return reply->status == SHARE_GIVEN && descriptor >= 0 && reply->size > 0 && reply->size < MOST_BYTES &&
           reply->requested > 0 && reply->requested <= reply->size;
}

static enum fetch_end talk(int socket, const struct share_handle *handle, struct share_reply *reply, int *descriptor)
{
    if (socket < 0) return FETCH_AGAIN;
    if (!connect_to(socket, handle) || !ask(socket, handle)) return not_now(handle);
    if (!receive(socket, reply, descriptor)) return not_now(handle);
    return is_sound(reply, *descriptor) ? FETCHED : FETCH_REFUSED;
}

enum fetch_end share_fetch(const struct share_handle *handle, struct share_reply *reply, int *descriptor)
{
    *descriptor = -1;
    descriptors_allow_more();
    int socket = loose_socket();
    enum fetch_end end = talk(socket, handle, reply, descriptor);
    loose_close(socket);
    descriptors_allow_as_before();
    if (end == FETCHED) return end;
    loose_close(*descriptor);
    *descriptor = -1;
    return end;
}
