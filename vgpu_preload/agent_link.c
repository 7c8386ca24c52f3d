#define _GNU_SOURCE
#include "agent_link.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "connection.h"
#include "descriptors.h"
#include "share_service.h"
#include "staging.h"

#define SEND_DEADLINE_MS 2000
#define FRAME_DEADLINE_MS 5000 /* from the first byte of a frame to its last */
#define IDLE_CHECK_MS 1000
#define FIRST_PAUSE_MS 100
#define LONGEST_PAUSE_MS 2000
#define DETACHED_PAUSE_MS 5 /* an application that goes on waits for this connection */
#define DETACHED_POLLS 12000 /* counted, not timed: the clock jumps when a checkpoint is restored */

enum visit_end {
    VISIT_FAILED,   /* nobody there, refused, or the connection broke before WELCOME */
    VISIT_LOST,     /* the connection broke after WELCOME */
    VISIT_DETACHED, /* the agent asked for it: a checkpoint is about to be taken */
    VISIT_LAST_THREAD,
};

struct pace {
    int pause_ms;
    int detached_polls;
};

/* True when all of the application's threads have ended with pthread_exit: libc waits for ours alone, and would for ever.
 * Seen without opening a file, for CRIU may freeze us at any point: the task directory has one link per thread, and the
 * executable of a leader that has ended cannot be read. */
static bool is_last_thread(void)
{
    struct stat tasks;
    char first_byte;
    if (syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/task", &tasks, 0) != 0) return false;
    if (tasks.st_nlink != 2 + 2 + share_service_threads()) return false;
    return readlink("/proc/self/exe", &first_byte, 1) < 0 && errno == ENOENT;
}

static uint16_t version_of(const struct hello *hello)
{
    return hello->is_staged ? 2 : 1;
}

static bool send_frame(const struct frame *frame, const char *payload)
{
    unsigned char header[FRAME_HEADER_SIZE];
    frame_write(header, frame);
    return connection_send(header, sizeof header, SEND_DEADLINE_MS) &&
           connection_send(payload, frame->payload_size, SEND_DEADLINE_MS);
}

static bool send_hello(const struct hello *hello)
{
    static char payload[8192]; /* 64 devices need 4.7 KiB; the helper is the only thread that comes here */
    struct hello_staged staged;
    if (hello->is_staged) staging_hello(&staged);
    size_t size = hello_write(hello, hello->is_staged ? &staged : NULL, payload, sizeof payload);
    struct frame frame = {.version = version_of(hello), .type = FRAME_HELLO, .payload_size = (uint32_t)size};
    return size > 0 && send_frame(&frame, payload);
}

static bool answer_empty(const struct hello *hello, const struct frame *to, enum frame_type type)
{
    struct frame frame = {
        .version = version_of(hello), .type = (uint16_t)type, .payload_size = 2, .sequence = to->sequence};
    return send_frame(&frame, "{}");
}

/* A frame with all that came with it. In driver mode nothing carries a payload, so it is read and dropped in small
 * pieces; the kernel closes descriptors that nobody asks for. */
struct arrival {
    struct frame frame;
    char *payload;
    int descriptors[MOST_DESCRIPTORS];
    size_t descriptor_count;
};

static bool drop_payload(uint32_t size)
{
    char scrap[256];
    while (size > 0) {
        uint32_t piece = size < sizeof scrap ? size : sizeof scrap;
        if (!connection_receive(scrap, piece, FRAME_DEADLINE_MS)) return false;
        size -= piece;
    }
    return true;
}

static char *payload_memory(void)
{
    static char *memory;
    if (memory != NULL) return memory;
    void *fresh = mmap(NULL, FRAME_MOST_PAYLOAD_STAGED, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh != MAP_FAILED) memory = fresh;
    return memory;
}

static bool receive_staged(struct arrival *arrival)
{
    unsigned char header[FRAME_HEADER_SIZE];
    bool needs_room = staging_expects_descriptors();
    if (needs_room) descriptors_allow_more();
    bool ok = connection_receive_with(header, sizeof header, arrival->descriptors, &arrival->descriptor_count,
                                      FRAME_DEADLINE_MS);
    if (needs_room) descriptors_allow_as_before();
    arrival->payload = payload_memory();
    return ok && arrival->payload != NULL && frame_read(&arrival->frame, header) &&
           connection_receive(arrival->payload, arrival->frame.payload_size, FRAME_DEADLINE_MS);
}

static void close_descriptors(const struct arrival *arrival)
{
    for (size_t n = 0; n < arrival->descriptor_count; n++) close(arrival->descriptors[n]);
}

static bool receive_frame(const struct hello *hello, struct arrival *arrival)
{
    unsigned char header[FRAME_HEADER_SIZE];
    arrival->descriptor_count = 0;
    if (!hello->is_staged)
        return connection_receive(header, sizeof header, FRAME_DEADLINE_MS) && frame_read(&arrival->frame, header) &&
               arrival->frame.version == 1 && drop_payload(arrival->frame.payload_size);
    if (receive_staged(arrival)) return true;
    close_descriptors(arrival);
    return false;
}

static bool answer(const struct hello *hello, const struct arrival *arrival)
{
    if (arrival->frame.type != FRAME_FDS) close_descriptors(arrival);
    if (arrival->frame.type == FRAME_PING) return answer_empty(hello, &arrival->frame, FRAME_PONG);
    if (!hello->is_staged) return true;
    return staging_answer(&arrival->frame, arrival->payload, arrival->descriptors, arrival->descriptor_count);
}

static enum visit_end serve(const struct hello *hello)
{
    static struct arrival arrival; /* the helper is the only thread that comes here */
    enum visit_end end = VISIT_FAILED;
    for (;;) {
        enum readiness readiness = connection_wait(IDLE_CHECK_MS);
        if (is_last_thread()) return VISIT_LAST_THREAD;
        if (readiness == QUIET) continue;
        if (readiness == BROKEN || !receive_frame(hello, &arrival)) return end;
        if (arrival.frame.type == FRAME_WELCOME) end = VISIT_LOST;
        if (!answer(hello, &arrival)) return end;
        if (arrival.frame.type == FRAME_DETACH) {
            share_service_close(CLOSED_FOR_DETACH);
            answer_empty(hello, &arrival.frame, FRAME_DETACHED);
            return VISIT_DETACHED;
        }
    }
}

static enum visit_end visit_agent(const struct hello *hello)
{
    if (!agent_socket_exists() || !connection_open()) return VISIT_FAILED;
    share_service_open(CLOSED_FOR_DETACH); /* whoever asked for it is back */
    enum visit_end end = send_hello(hello) ? serve(hello) : VISIT_FAILED;
    connection_close();
    return end;
}

static void set_pace(struct pace *pace, enum visit_end end)
{
    if (end == VISIT_DETACHED) pace->detached_polls = DETACHED_POLLS;
    if (end == VISIT_LOST) pace->detached_polls = 0;
    if (end != VISIT_FAILED) pace->pause_ms = FIRST_PAUSE_MS;
}

static void nobody_came_back(void)
{
    staging_agent_is_gone();
    share_service_open(CLOSED_FOR_DETACH);
}

static void rest(struct pace *pace)
{
    int pause_ms = pace->pause_ms;
    if (pace->detached_polls > 0) {
        if (--pace->detached_polls == 0) nobody_came_back();
        pause_ms = DETACHED_PAUSE_MS;
    } else {
        pace->pause_ms = pause_ms * 2 < LONGEST_PAUSE_MS ? pause_ms * 2 : LONGEST_PAUSE_MS;
    }
    struct timespec pause = {.tv_sec = pause_ms / 1000, .tv_nsec = pause_ms % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

static void run(const struct hello *hello)
{
    struct pace pace = {.pause_ms = FIRST_PAUSE_MS};
    for (;;) {
        enum visit_end end = visit_agent(hello);
        if (end == VISIT_LAST_THREAD) return;
        if (end == VISIT_LOST || (end == VISIT_FAILED && pace.detached_polls == 0)) staging_agent_is_gone();
        set_pace(&pace, end);
        rest(&pace);
        if (is_last_thread()) return;
    }
}

void agent_link_run(const struct hello *hello)
{
    run(hello);
    share_service_end();
}
