/* Interprocess events: a file in /dev/shm of the maker, which whoever opens the event maps too.
 *
 * As measured on the real driver the file is called cuda.shm.<uid>.<pid in hex>.<n>, and neither checkpoint nor restore of one of the
 * processes touches it: what was recorded before is waited for afterwards. Processes do not wake each other; who waits looks again.
 * Assumed, not measured: the codes of faults. A process that is killed leaves its files.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

#define SHARED_MAGIC 0x7665646572616873ull
#define HANDLE_MAGIC 0x56455043495347ull
#define MOST_FILES 4096

struct ipc_handle { char reserved[64]; };
struct content { uint64_t magic; int uid, pid, number; uint64_t check; };
_Static_assert(sizeof(struct content) <= sizeof(struct ipc_handle), "a handle has 64 bytes");

static bool is_there[MOST_FILES]; /* files of this process */
static int owner;                 /* the process that made them; a forked child is another */

static void path_of(const struct content *content, char path[64])
{
    snprintf(path, 64, "/dev/shm/cuda.shm.%d.%x.%d", content->uid, (unsigned)content->pid, content->number);
}

static struct content content_of(int number)
{
    struct content content = {.magic = HANDLE_MAGIC, .uid = (int)getuid(), .pid = getpid(), .number = number};
    content.check = HANDLE_MAGIC ^ ((uint64_t)content.pid << 32 | (uint32_t)content.number) ^ (uint64_t)content.uid << 20;
    return content;
}

static struct shared_event *map(int file)
{
    if (file < 0) return NULL;
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return page == MAP_FAILED ? NULL : page;
}

struct shared_event *shared_event_make(int *number)
{
    char path[64];
    pthread_mutex_lock(&driver_lock);
    if (owner != getpid()) memset(is_there, 0, sizeof is_there);
    owner = getpid();
    int free_number = 1;
    while (free_number < MOST_FILES && is_there[free_number]) free_number++;
    bool ok = free_number < MOST_FILES;
    if (ok) is_there[free_number] = true;
    pthread_mutex_unlock(&driver_lock);
    if (!ok) return NULL;
    struct content content = content_of(free_number);
    path_of(&content, path);
    unlink(path); /* of an earlier process with this id */
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0 && ftruncate(file, PAGE) != 0) close(file), file = -1;
    struct shared_event *shared = map(file);
    if (!shared) {
        shared_event_end(free_number);
        return NULL;
    }
    shared->magic = SHARED_MAGIC;
    *number = free_number;
    return shared;
}

void shared_event_end(int number)
{
    char path[64];
    struct content content = content_of(number);
    if (number <= 0 || owner != getpid()) return;
    path_of(&content, path);
    unlink(path);
    pthread_mutex_lock(&driver_lock);
    is_there[number] = false;
    pthread_mutex_unlock(&driver_lock);
}

static __attribute__((destructor)) void end_all(void)
{
    for (int number = 1; number < MOST_FILES && owner == getpid(); number++)
        if (is_there[number]) shared_event_end(number);
}

/* Pieces of work of two processes may come out of order. */
void shared_event_reach(struct shared_event *shared, uint64_t recorded)
{
    uint64_t seen = __atomic_load_n(&shared->reached, __ATOMIC_ACQUIRE);
    while (seen < recorded && !__atomic_compare_exchange_n(&shared->reached, &seen, recorded, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
}

API(cuIpcGetEventHandle, (struct ipc_handle *handle, CUevent event), (handle, event))
{
    NEED(handle, CUDA_ERROR_INVALID_VALUE);
    NEED(event_is_valid(event) && event->shared_file > 0, CUDA_ERROR_INVALID_HANDLE);
    struct content content = content_of(event->shared_file);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &content, sizeof content);
    return CUDA_SUCCESS;
}

API(cuIpcOpenEventHandle, (CUevent *out, struct ipc_handle handle), (out, handle))
{
    struct content content;
    char path[64];
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(context_current(), CUDA_ERROR_INVALID_CONTEXT);
    memcpy(&content, &handle, sizeof content);
    NEED(content.magic == HANDLE_MAGIC && content.number > 0 && content.number < MOST_FILES, CUDA_ERROR_INVALID_VALUE);
    NEED(content.pid != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    path_of(&content, path);
    struct shared_event *shared = map(open(path, O_RDWR | O_CLOEXEC));
    NEED(shared, CUDA_ERROR_INVALID_HANDLE);
    if (shared->magic != SHARED_MAGIC) {
        munmap(shared, PAGE);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return event_new(out, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, shared, -1);
}
