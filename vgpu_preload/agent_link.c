#define _GNU_SOURCE
#include "agent_link.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "connection.h"

#define SEND_DEADLINE_MS 2000
#define FRAME_DEADLINE_MS 5000 /* from the first byte of a frame to its last */
#define IDLE_CHECK_MS 1000
#define FIRST_PAUSE_MS 100
#define LONGEST_PAUSE_MS 2000
#define DETACHED_PAUSE_MS 50
#define DETACHED_POLLS 1200 /* counted, not timed: the clock jumps when a checkpoint is restored */

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

/* True when all other threads have ended with pthread_exit: libc waits for the helper alone, and would for ever.
 * Seen without opening a file, for CRIU may freeze us at any point: the task directory has one link per thread, and the
 * executable of a leader that has ended cannot be read. */
static bool is_last_thread(void)
{
    struct stat tasks;
    char first_byte;
    if (syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/task", &tasks, 0) != 0 || tasks.st_nlink != 2 + 2) return false;
    return readlink("/proc/self/exe", &first_byte, 1) < 0 && errno == ENOENT;
}

static bool send_frame(enum frame_type type, uint32_t sequence, const char *payload, size_t size)
{
    unsigned char header[FRAME_HEADER_SIZE];
    struct frame frame = {.type = (uint16_t)type, .payload_size = (uint32_t)size, .sequence = sequence};
    frame_write(header, &frame);
    return connection_send(header, sizeof header, SEND_DEADLINE_MS) &&
           connection_send(payload, size, SEND_DEADLINE_MS);
}

static bool send_hello(const struct hello *hello)
{
    static char payload[8192]; /* 64 devices need 4.7 KiB; the helper is the only thread that comes here */
    size_t size = hello_write(hello, payload, sizeof payload);
    return size > 0 && send_frame(FRAME_HELLO, 0, payload, size);
}

/* Nothing that this version understands carries a payload, so it is read and dropped in small pieces. */
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

static bool receive_frame(struct frame *frame)
{
    unsigned char header[FRAME_HEADER_SIZE];
    return connection_receive(header, sizeof header, FRAME_DEADLINE_MS) && frame_read(frame, header) &&
           drop_payload(frame->payload_size);
}

static enum visit_end serve(void)
{
    enum visit_end end = VISIT_FAILED;
    for (;;) {
        struct frame frame;
        enum readiness readiness = connection_wait(IDLE_CHECK_MS);
        if (is_last_thread()) return VISIT_LAST_THREAD;
        if (readiness == QUIET) continue;
        if (readiness == BROKEN || !receive_frame(&frame)) return end;
        if (frame.type == FRAME_WELCOME) end = VISIT_LOST;
        if (frame.type == FRAME_PING && !send_frame(FRAME_PONG, frame.sequence, "{}", 2)) return end;
        if (frame.type == FRAME_DETACH) {
            send_frame(FRAME_DETACHED, frame.sequence, "{}", 2);
            return VISIT_DETACHED;
        }
    }
}

static enum visit_end visit_agent(const struct hello *hello)
{
    if (!agent_socket_exists() || !connection_open()) return VISIT_FAILED;
    enum visit_end end = send_hello(hello) ? serve() : VISIT_FAILED;
    connection_close();
    return end;
}

static void set_pace(struct pace *pace, enum visit_end end)
{
    if (end == VISIT_DETACHED) pace->detached_polls = DETACHED_POLLS;
    if (end == VISIT_LOST) pace->detached_polls = 0;
    if (end != VISIT_FAILED) pace->pause_ms = FIRST_PAUSE_MS;
}

static void rest(struct pace *pace)
{
    int pause_ms = pace->pause_ms;
    if (pace->detached_polls > 0) {
        pace->detached_polls--;
        pause_ms = DETACHED_PAUSE_MS;
    } else {
        pace->pause_ms = pause_ms * 2 < LONGEST_PAUSE_MS ? pause_ms * 2 : LONGEST_PAUSE_MS;
    }
    struct timespec pause = {.tv_sec = pause_ms / 1000, .tv_nsec = pause_ms % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

void agent_link_run(const struct hello *hello)
{
    struct pace pace = {.pause_ms = FIRST_PAUSE_MS};
    for (;;) {
        enum visit_end end = visit_agent(hello);
        if (end == VISIT_LAST_THREAD) return;
        set_pace(&pace, end);
        rest(&pace);
        if (is_last_thread()) return;
    }
}
