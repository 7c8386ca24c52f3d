/* cuCheckpointProcess*: steers another process (or this one) through its control block.
 *
 * Answers as measured on driver 580.159.04 (H200): a process without initialised CUDA (plain, with the library only loaded, or
 * forked from one that uses CUDA) gives CUDA_ERROR_NOT_INITIALIZED; a pid that is no process gives CUDA_ERROR_OPERATING_SYSTEM; of a
 * stopped or frozen process every call waits until it runs again, a lock past its time-out too.
 * Assumed, not measured: CUDA_ERROR_OPERATING_SYSTEM also for a process that this one may not read, or that dies during the call.
 * The caller must itself have called cuInit. None of these calls passes the gate: a locked process may still be asked about, and a
 * process may lock itself from a thread of its own.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "control.h"
#include "driver.h"

static bool read_target(int pid, uint64_t address, void *into, size_t bytes)
{
    struct iovec here = {into, bytes}, there = {(void *)address, bytes};
    return process_vm_readv(pid, &here, 1, &there, 1, 0) == (ssize_t)bytes;
}

static bool write_target(int pid, uint64_t address, const void *from, size_t bytes)
{
    struct iovec here = {(void *)from, bytes}, there = {(void *)address, bytes};
    return process_vm_writev(pid, &here, 1, &there, 1, 0) == (ssize_t)bytes;
}

/* Compared in two parts so that this code holds no second copy of the magic. */
static bool is_magic(const char *at)
{
    return !memcmp(at, CONTROL_MAGIC_HEAD, sizeof CONTROL_MAGIC_HEAD) && !memcmp(at + 12, CONTROL_MAGIC_TAIL, 3);
}

static uint64_t scan(int pid, uint64_t start, uint64_t end)
{
    static _Thread_local char page[PAGE];
    for (; start < end; start += PAGE) {
        if (!read_target(pid, start, page, PAGE)) return 0;
        for (size_t at = 0; at < PAGE; at += CONTROL_ALIGNMENT)
            if (is_magic(page + at)) return start + at;
    }
    return 0;
}

/* The library may be another build under another path (a container's musl copy), so the block is found by its magic in the
 * writable mappings of any file named libcuda.so*. */
static CUresult find_block(int pid, uint64_t *address)
{
    char path[64], line[600];
    uint64_t found = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    if (!maps) return CUDA_ERROR_OPERATING_SYSTEM;
    while (!found && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char protection[5];
        const char *name = strrchr(line, '/');
        if (!name || strncmp(name, "/libcuda.so", 11) != 0) continue;
        if (sscanf(line, "%lx-%lx %4s", &start, &end, protection) != 3 || protection[0] != 'r' || protection[1] != 'w') continue;
        found = scan(pid, start, end);
    }
    fclose(maps);
    *address = found;
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static CUresult locate(int pid, uint64_t *address, struct control_block *block)
{
    NEED(gate_is_initialised() && !gate_is_forked(), CUDA_ERROR_NOT_INITIALIZED);
    TRY(find_block(pid, address));
    NEED(read_target(pid, *address, block, sizeof *block), CUDA_ERROR_OPERATING_SYSTEM);
    NEED(block->layout == CONTROL_LAYOUT && block->size == sizeof *block && block->initialised, CUDA_ERROR_NOT_INITIALIZED);
    return CUDA_SUCCESS;
}

static CUresult wait_for_answer(int pid, uint64_t address, uint32_t number)
{
    struct timespec pause = {0, 500000};
    struct control_block block;
    do { /* ends when the process answers or is gone; the caller's own deadline is timeoutMs */
        nanosleep(&pause, NULL);
        NEED(read_target(pid, address, &block, sizeof block), CUDA_ERROR_OPERATING_SYSTEM);
        NEED(block.initialised, CUDA_ERROR_NOT_INITIALIZED);
    } while (block.answer_number != number);
    return block.result;
}

static CUresult ask_locked(int pid, const struct control_request *request)
{
    struct control_block block;
    uint64_t address;
    TRY(locate(pid, &address, &block));
    uint32_t number = block.request_number + 1;
    NEED(write_target(pid, address + offsetof(struct control_block, request), request, sizeof *request), CUDA_ERROR_OPERATING_SYSTEM);
    NEED(write_target(pid, address + offsetof(struct control_block, request_number), &number, sizeof number), CUDA_ERROR_OPERATING_SYSTEM);
    return wait_for_answer(pid, address, number);
}

/* One request at a time per target, whoever asks: a lock on its /proc entry, which goes with the asking process. */
static CUresult ask(int pid, const struct control_request *request)
{
    char path[64];
    NEED(gate_is_initialised() && !gate_is_forked(), CUDA_ERROR_NOT_INITIALIZED);
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    NEED(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    CUresult rc = flock(fd, LOCK_EX) == 0 ? ask_locked(pid, request) : CUDA_ERROR_OPERATING_SYSTEM;
    close(fd);
    return rc;
}

/* Two that ask at once may take the same number; one look of the target answers both. */
static CUresult wait_until_told(int pid, uint64_t address, struct control_block *block)
{
    struct timespec pause = {0, 500000};
    uint32_t number = block->question_number + 1;
    NEED(write_target(pid, address + offsetof(struct control_block, question_number), &number, sizeof number), CUDA_ERROR_OPERATING_SYSTEM);
    do { /* ends when the process runs or is gone */
        nanosleep(&pause, NULL);
        NEED(read_target(pid, address, block, sizeof *block), CUDA_ERROR_OPERATING_SYSTEM);
        NEED(block->initialised, CUDA_ERROR_NOT_INITIALIZED); /* a child that was only just forked */
    } while ((int32_t)(block->told_number - number) < 0);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    struct control_block block;
    uint64_t address;
    NEED(state, CUDA_ERROR_INVALID_VALUE);
    TRY(locate(pid, &address, &block));
    TRY(wait_until_told(pid, address, &block));
    *state = (CUprocessState)block.state;
    return CUDA_SUCCESS;
}

/* The last number of the NSpid line is the thread's id in its own namespace. */
static int namespace_tid(int pid, const char *tid)
{
    char path[80], line[256];
    int last = -1;
    snprintf(path, sizeof path, "/proc/%d/task/%.20s/status", pid, tid);
    FILE *status = fopen(path, "re");
    if (!status) return -1;
    while (fgets(line, sizeof line, status)) {
        if (strncmp(line, "NSpid:", 6) != 0) continue;
        last = atoi(strrchr(line, '\t') + 1);
        break;
    }
    fclose(status);
    return last;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    struct control_block block;
    uint64_t address;
    char path[64];
    NEED(tid, CUDA_ERROR_INVALID_VALUE);
    TRY(locate(pid, &address, &block));
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    NEED(tasks, CUDA_ERROR_OPERATING_SYSTEM);
    *tid = 0;
    for (struct dirent *task = readdir(tasks); task && !*tid; task = readdir(tasks))
        if (task->d_name[0] != '.' && namespace_tid(pid, task->d_name) == block.ns_driver_tid) *tid = atoi(task->d_name);
    closedir(tasks);
    return *tid ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static bool is_zero(const void *bytes, size_t count)
{
    for (size_t n = 0; n < count; n++)
        if (((const char *)bytes)[n]) return false;
    return true;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    NEED(!args || (is_zero(args->reserved1, sizeof args->reserved1) && !args->reserved0), CUDA_ERROR_INVALID_VALUE);
    return ask(pid, &(struct control_request){.command = COMMAND_LOCK, .timeout_ms = args ? args->timeoutMs : 0});
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    NEED(!args || is_zero(args, sizeof *args), CUDA_ERROR_INVALID_VALUE);
    return ask(pid, &(struct control_request){.command = COMMAND_CHECKPOINT});
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    struct control_request request = {.command = COMMAND_RESTORE};
    if (args && args->gpuPairsCount) {
        NEED(args->gpuPairs && args->gpuPairsCount <= MAX_DEVICES, CUDA_ERROR_INVALID_VALUE);
        request.pair_count = args->gpuPairsCount;
        memcpy(request.pairs, args->gpuPairs, args->gpuPairsCount * sizeof request.pairs[0]);
    }
    return ask(pid, &request);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
    NEED(!args || is_zero(args, sizeof *args), CUDA_ERROR_INVALID_VALUE);
    return ask(pid, &(struct control_request){.command = COMMAND_UNLOCK});
}
