#define _GNU_SOURCE
#include "share_service.h"

#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "loose_descriptors.h"
#include "offers.h"
#include "random.h"
#include "share_wire.h"
#include "threads.h"

#define MOST_CALLERS 32
#define BACKLOG 128
#define CALLER_DEADLINE_MS 5000
#define IDLE_CHECK_MS 1000
#define LISTEN_AGAIN_US 50000 /* the name may still be held by somebody who dies */
#define START_DEADLINE_MS 5000
#define CLOSE_DEADLINE_MS 2000
#define POLL_US 50
#define PAUSE_US 1000
#define ENDING 4 /* beside the reasons of share_closing */

struct caller {
    int socket; /* -1: a free place */
    int64_t end_ms;
};

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static unsigned char name[SHARE_NAME_BYTES];
static _Atomic(int) thread_id;       /* 0: none */
static _Atomic(uint32_t) closed_for; /* what is waited for before it opens: share_closing and ENDING */
static _Atomic(bool) is_serving;
static _Atomic(int) listener = -1;

static long futex(int operation, uint32_t value)
{
    return syscall(SYS_futex, &closed_for, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static bool listen_under_name(void)
{
    struct sockaddr_un address;
    socklen_t length = share_address(name, &address);
    int socket = loose_socket();
    if (socket >= 0 && bind(socket, (struct sockaddr *)&address, length) == 0 && listen(socket, BACKLOG) == 0) {
        atomic_store(&listener, socket);
        return true;
    }
    loose_close(socket);
    return false;
}

static void reply_to(int socket, const struct share_request *request)
{
    struct share_reply reply = {.magic = SHARE_REPLY_MAGIC, .status = SHARE_DENIED};
    int process = 0, descriptor = -1;
    if (share_peer_is_trusted(socket, &process)) offer_give(request, process, &reply, &descriptor);
    loose_send(socket, &reply, sizeof reply, descriptor);
    loose_close(descriptor);
}

/* True when the caller has had its answer, or will never have one. */
static bool attend(const struct caller *caller)
{
    struct share_request request;
    int unasked = -1;
    if (!loose_is_ours(caller->socket)) return true;
    ssize_t size = loose_receive(caller->socket, &request, sizeof request, &unasked);
    loose_close(unasked);
    if (size < 0) return clock_now_ms() >= caller->end_ms;
    if (size == sizeof request && request.magic == SHARE_REQUEST_MAGIC) reply_to(caller->socket, &request);
    return true;
}

/* True when somebody's turn is over. */
static bool attend_all(struct caller callers[MOST_CALLERS])
{
    bool has_moved = false;
    for (int n = 0; n < MOST_CALLERS; n++) {
        if (callers[n].socket < 0 || !attend(&callers[n])) continue;
        loose_close(callers[n].socket);
        callers[n].socket = -1;
        has_moved = true;
    }
    return has_moved;
}

/* False: every place is taken, or nobody is there. */
static bool take_caller(struct caller callers[MOST_CALLERS])
{
    for (int n = 0; n < MOST_CALLERS; n++) {
        if (callers[n].socket >= 0) continue;
        callers[n] = (struct caller){loose_accept(atomic_load(&listener)), clock_now_ms() + CALLER_DEADLINE_MS};
        return callers[n].socket >= 0;
    }
    return false;
}

static void wait_for_callers(const struct caller callers[MOST_CALLERS])
{
    struct pollfd wanted[MOST_CALLERS + 1];
    nfds_t count = 0;
    bool has_room = false;
    for (int n = 0; n < MOST_CALLERS; n++) {
        if (callers[n].socket < 0)
            has_room = true;
        else
            wanted[count++] = (struct pollfd){.fd = callers[n].socket, .events = POLLIN};
    }
    if (has_room) wanted[count++] = (struct pollfd){.fd = atomic_load(&listener), .events = POLLIN};
    poll(wanted, count, IDLE_CHECK_MS);
}

/* Until it has to close, or the application has closed the socket under us. */
static void serve(void)
{
    struct caller callers[MOST_CALLERS];
    for (int n = 0; n < MOST_CALLERS; n++) callers[n].socket = -1;
    while (atomic_load(&closed_for) == 0 && loose_is_ours(atomic_load(&listener))) {
        wait_for_callers(callers);
        if (atomic_load(&closed_for) != 0 || !loose_is_ours(atomic_load(&listener))) break;
        bool has_moved = false;
        while (take_caller(callers)) has_moved = true;
        /* No number for a caller, or a caller that says nothing: not to be asked about without a pause. */
        if (!attend_all(callers) && !has_moved) clock_sleep_us(PAUSE_US);
    }
    for (int n = 0; n < MOST_CALLERS; n++) loose_close(callers[n].socket);
    loose_close(atomic_exchange(&listener, -1));
}

static void *service_main(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, SHARE_THREAD_NAME);
    atomic_store(&thread_id, (int)syscall(SYS_gettid));
    for (uint32_t reasons = 0; (reasons & ENDING) == 0; reasons = atomic_load(&closed_for)) {
        if (reasons != 0) {
            futex(FUTEX_WAIT, reasons);
            continue;
        }
        atomic_store(&is_serving, true); /* before the look at the reasons: whoever closes sees one of the two */
        if (atomic_load(&closed_for) == 0 && listen_under_name())
            serve();
        else if (atomic_load(&closed_for) == 0)
            clock_sleep_us(LISTEN_AGAIN_US);
        atomic_store(&is_serving, false);
    }
    atomic_store(&thread_id, 0);
    return NULL;
}

static bool start_locked(void)
{
    if (atomic_load(&thread_id) != 0) return true;
    if (!random_bytes(name, sizeof name) || !thread_start(service_main, NULL)) return false;
    int64_t end = clock_now_ms() + START_DEADLINE_MS;
    while (atomic_load(&thread_id) == 0 && clock_now_ms() < end) clock_sleep_us(POLL_US);
    return atomic_load(&thread_id) != 0;
}

bool share_service_start(struct share_handle *where)
{
    pthread_mutex_lock(&starting);
    bool is_there = start_locked();
    memcpy(where->name, name, sizeof name);
    pthread_mutex_unlock(&starting);
    where->process = getpid();
    where->thread = atomic_load(&thread_id);
    return is_there;
}

bool share_service_is_mine(const struct share_handle *handle)
{
    return atomic_load(&thread_id) != 0 && memcmp(handle->name, name, sizeof name) == 0;
}

bool share_service_close(enum share_closing reason)
{
    atomic_fetch_or(&closed_for, (uint32_t)reason);
    int64_t end = clock_now_ms() + CLOSE_DEADLINE_MS;
    while (atomic_load(&is_serving) && clock_now_ms() < end) {
        loose_shut_down(atomic_load(&listener));
        clock_sleep_us(POLL_US);
    }
    return !atomic_load(&is_serving);
}

void share_service_open(enum share_closing reason)
{
    uint32_t before = atomic_fetch_and(&closed_for, ~(uint32_t)reason);
    if ((before & (uint32_t)reason) != 0) futex(FUTEX_WAKE, INT_MAX);
}

unsigned int share_service_threads(void)
{
    return atomic_load(&thread_id) != 0 ? 1 : 0;
}

void share_service_end(void)
{
    atomic_fetch_or(&closed_for, ENDING);
    futex(FUTEX_WAKE, INT_MAX);
    int64_t end = clock_now_ms() + CLOSE_DEADLINE_MS;
    while (atomic_load(&thread_id) != 0 && clock_now_ms() < end) {
        loose_shut_down(atomic_load(&listener));
        clock_sleep_us(POLL_US);
    }
}

/* The sockets are closed with the other loose descriptors; the name is the parent's. */
void share_service_after_fork_in_child(void)
{
    pthread_mutex_init(&starting, NULL);
    atomic_store(&thread_id, 0);
    atomic_store(&closed_for, 0);
    atomic_store(&is_serving, false);
    atomic_store(&listener, -1);
}
