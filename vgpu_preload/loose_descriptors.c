#define _GNU_SOURCE
#include "loose_descriptors.h"

#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "descriptors.h"

#define MOST_LOOSE 512

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kept_descriptor list[MOST_LOOSE];
static unsigned int list_end; /* places behind it were never used */

static struct kept_descriptor *place_of(int descriptor)
{
    for (unsigned int n = 0; n < list_end; n++)
        if (list[n].number == descriptor) return &list[n];
    return NULL;
}

static int note_locked(int descriptor)
{
    if (descriptor < 0) return -1;
    struct kept_descriptor *place = place_of(-1);
    if (place == NULL && list_end < MOST_LOOSE) place = &list[list_end++];
    if (place == NULL) {
        close(descriptor);
        return -1;
    }
    *place = descriptor_keep(descriptor);
    return descriptor;
}

int loose_note(int descriptor)
{
    pthread_mutex_lock(&lock);
    descriptor = note_locked(descriptor);
    pthread_mutex_unlock(&lock);
    return descriptor;
}

int loose_copy(const struct kept_descriptor *kept)
{
    int copy;
    pthread_mutex_lock(&lock);
    copy = kept_copy(kept, &copy) ? note_locked(copy) : -1;
    pthread_mutex_unlock(&lock);
    return copy;
}

void loose_keep_copy(int descriptor, struct kept_descriptor *place)
{
    pthread_mutex_lock(&lock);
    *place = descriptor_keep_copy(descriptor);
    pthread_mutex_unlock(&lock);
}

static int note_moved_up_locked(int descriptor)
{
    return descriptor >= 0 ? note_locked(descriptor_move_up(descriptor)) : -1;
}

int loose_socket(void)
{
    descriptors_allow_more();
    pthread_mutex_lock(&lock);
    int descriptor = note_moved_up_locked(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    pthread_mutex_unlock(&lock);
    descriptors_allow_as_before();
    return descriptor;
}

int loose_accept(int listener)
{
    descriptors_allow_more();
    pthread_mutex_lock(&lock);
    int descriptor = note_moved_up_locked(accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
    pthread_mutex_unlock(&lock);
    descriptors_allow_as_before();
    return descriptor;
}

union control_buffer {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr aligned;
};

/* More than one descriptor in a message has no room here, and the kernel closes what has none. */
static int descriptor_in(struct msghdr *message)
{
    int descriptor = -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    bool is_one = header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
                  header->cmsg_len == CMSG_LEN(sizeof descriptor);
    if (is_one) memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    return descriptor;
}

ssize_t loose_receive(int socket, void *bytes, size_t size, int *descriptor)
{
    union control_buffer control;
    struct iovec piece = {.iov_base = bytes, .iov_len = size};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    pthread_mutex_lock(&lock);
    ssize_t received = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *descriptor = received >= 0 ? note_locked(descriptor_in(&message)) : -1;
    pthread_mutex_unlock(&lock);
    return received;
}

ssize_t loose_send(int socket, const void *bytes, size_t size, int descriptor)
{
    union control_buffer control = {.bytes = {0}};
    struct iovec piece = {.iov_base = (void *)bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof descriptor);
        memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool loose_is_ours(int descriptor)
{
    pthread_mutex_lock(&lock);
    struct kept_descriptor *place = descriptor >= 0 ? place_of(descriptor) : NULL;
    bool is_ours = place != NULL && descriptor_is_still(descriptor, place->identity);
    pthread_mutex_unlock(&lock);
    return is_ours;
}

void loose_shut_down(int descriptor)
{
    pthread_mutex_lock(&lock);
    struct kept_descriptor *place = descriptor >= 0 ? place_of(descriptor) : NULL;
    if (place != NULL && descriptor_is_still(descriptor, place->identity)) shutdown(descriptor, SHUT_RDWR);
    pthread_mutex_unlock(&lock);
}

void loose_close(int descriptor)
{
    if (descriptor < 0) return;
    pthread_mutex_lock(&lock);
    struct kept_descriptor *place = place_of(descriptor);
    if (place != NULL) kept_close(place);
    pthread_mutex_unlock(&lock);
}

void loose_before_fork(void)
{
    pthread_mutex_lock(&lock);
}

void loose_after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

void loose_after_fork_in_child(void)
{
    for (unsigned int n = 0; n < list_end; n++) kept_close(&list[n]);
    pthread_mutex_init(&lock, NULL);
}
