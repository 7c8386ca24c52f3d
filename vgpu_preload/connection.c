#define _GNU_SOURCE
#include "connection.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"

/* Programs count, list and reserve low descriptors; 200 is the usual number of lock files in scripts (flock(1)). */
static const int wanted_descriptors[] = {900, 201};

/* Held only between system calls that cannot block, so a fork in any thread waits microseconds for it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
    int descriptor; /* -1: none */
    dev_t device;
    ino_t inode;
} ours = {.descriptor = -1};

bool agent_socket_exists(void)
{
    return access(VGPU_SOCKET_PATH, F_OK) == 0;
}

/* As a system call: the function has another name in old glibc, in new glibc and in musl. */
static bool look_at(int descriptor, struct stat *identity)
{
    return syscall(SYS_fstat, descriptor, identity) == 0;
}

static bool still_ours(void)
{
    struct stat now;
    return ours.descriptor >= 0 && look_at(ours.descriptor, &now) && S_ISSOCK(now.st_mode) &&
           now.st_dev == ours.device && now.st_ino == ours.inode;
}

static int move_up(int descriptor)
{
    for (size_t n = 0; n < sizeof wanted_descriptors / sizeof *wanted_descriptors; n++) {
        int moved = fcntl(descriptor, F_DUPFD_CLOEXEC, wanted_descriptors[n]);
        if (moved < 0) continue;
        close(descriptor);
        return moved;
    }
    return descriptor;
}

static bool make_socket(void)
{
    struct stat identity;
    pthread_mutex_lock(&lock);
    int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (descriptor >= 0) descriptor = move_up(descriptor);
    if (descriptor >= 0 && look_at(descriptor, &identity)) {
        ours.descriptor = descriptor;
        ours.device = identity.st_dev;
        ours.inode = identity.st_ino;
    }
    pthread_mutex_unlock(&lock);
    return ours.descriptor >= 0;
}

bool connection_open(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = VGPU_SOCKET_PATH};
    if (!make_socket()) return false;
    /* A local connect succeeds or fails at once; EAGAIN means that the agent's queue is full. */
    if (still_ours() && connect(ours.descriptor, (struct sockaddr *)&address, sizeof address) == 0) return true;
    connection_close();
    return false;
}

void connection_close(void)
{
    pthread_mutex_lock(&lock);
    if (still_ours()) close(ours.descriptor);
    ours.descriptor = -1;
    pthread_mutex_unlock(&lock);
}

static enum readiness wait_for(short events, int milliseconds)
{
    struct pollfd wanted = {.fd = ours.descriptor, .events = events};
    if (!still_ours()) return BROKEN;
    int count = poll(&wanted, 1, milliseconds);
    if (count < 0 && errno != EINTR) return BROKEN;
    if (count <= 0) return QUIET;
    return (wanted.revents & events) != 0 ? READY : BROKEN;
}

enum readiness connection_wait(int milliseconds)
{
    return wait_for(POLLIN, milliseconds);
}

/* Descriptors on their way; the ones that come are added, the ones that go leave with the first byte. */
struct cargo {
    int descriptors[MOST_DESCRIPTORS];
    size_t count;
};

typedef ssize_t transfer_step(void *bytes, size_t size, struct cargo *cargo);

union control_buffer {
    char bytes[CMSG_SPACE(sizeof(int) * MOST_DESCRIPTORS)];
    struct cmsghdr aligned;
};

static ssize_t send_step(void *bytes, size_t size, struct cargo *cargo)
{
    union control_buffer control;
    struct iovec piece = {.iov_base = bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (cargo != NULL && cargo->count > 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * cargo->count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * cargo->count);
        memcpy(CMSG_DATA(header), cargo->descriptors, sizeof(int) * cargo->count);
    }
    ssize_t sent = sendmsg(ours.descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0 && cargo != NULL) cargo->count = 0;
    return sent;
}

/* A Unix socket delivers all descriptors of a message under one header. */
static void take_descriptors(struct msghdr *message, struct cargo *cargo)
{
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    if (header == NULL || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return;
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t n = 0; n < count; n++) {
        int descriptor;
        memcpy(&descriptor, CMSG_DATA(header) + n * sizeof descriptor, sizeof descriptor);
        if (cargo->count < MOST_DESCRIPTORS)
            cargo->descriptors[cargo->count++] = descriptor;
        else
            close(descriptor);
    }
}

/* Without a place for descriptors the kernel closes what somebody sends. */
static ssize_t receive_step(void *bytes, size_t size, struct cargo *cargo)
{
    union control_buffer control;
    struct iovec piece = {.iov_base = bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (cargo != NULL) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
    }
    ssize_t received = recvmsg(ours.descriptor, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received > 0 && cargo != NULL) take_descriptors(&message, cargo);
    return received;
}

static bool transfer(transfer_step *step, short events, char *bytes, size_t size, struct cargo *cargo, int deadline_ms)
{
    int64_t end = clock_now_ms() + deadline_ms;
    while (size > 0) {
        int64_t left = end - clock_now_ms();
        if (left <= 0 || wait_for(events, (int)left) == BROKEN) return false;
        if (!still_ours()) return false;
        ssize_t moved = step(bytes, size, cargo);
        if (moved == 0) return false;
        if (moved < 0 && errno != EAGAIN && errno != EINTR) return false;
        if (moved < 0) continue;
        bytes += moved;
        size -= (size_t)moved;
    }
    return true;
}

bool connection_send(const void *bytes, size_t size, int deadline_ms)
{
    return transfer(send_step, POLLOUT, (char *)bytes, size, NULL, deadline_ms);
}

bool connection_receive(void *bytes, size_t size, int deadline_ms)
{
    return transfer(receive_step, POLLIN, bytes, size, NULL, deadline_ms);
}

bool connection_send_with(const void *bytes, size_t size, const int *descriptors, size_t count, int deadline_ms)
{
    struct cargo cargo = {.count = count};
    if (count > MOST_DESCRIPTORS) return false;
    if (count > 0) memcpy(cargo.descriptors, descriptors, count * sizeof *descriptors);
    return transfer(send_step, POLLOUT, (char *)bytes, size, &cargo, deadline_ms);
}

bool connection_receive_with(void *bytes, size_t size, int *descriptors, size_t *count, int deadline_ms)
{
    struct cargo cargo = {.count = 0};
    bool ok = transfer(receive_step, POLLIN, bytes, size, &cargo, deadline_ms);
    memcpy(descriptors, cargo.descriptors, cargo.count * sizeof *descriptors);
    *count = cargo.count;
    return ok;
}

void connection_before_fork(void)
{
    pthread_mutex_lock(&lock);
}

void connection_after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

void connection_after_fork_in_child(void)
{
    if (still_ours()) close(ours.descriptor);
    ours.descriptor = -1;
    pthread_mutex_unlock(&lock);
}
