/* Two processes that share an event: `event_pair OUT`. Writes "step N ok" for each round in which the order was kept.
 *
 * The maker's stream works for some milliseconds, then notes the round in memory that both have, then records the event;
 * the opener's stream waits for the event and looks whether the round is noted. Both are forked before CUDA is
 * initialised and go on until the parent is ended. Called by tests/native/test_shared_events.py; knows nothing of agents.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../vgpu_preload/cuda_abi.h"

extern CUresult cuInit(unsigned int flags);
extern CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
extern CUresult cuCtxSetCurrent(CUcontext context);
extern CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
extern CUresult cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream);
extern CUresult cuMemcpyDtoH_v2(void *host, CUdeviceptr address, size_t size);
extern CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
extern CUresult cuStreamSynchronize(CUstream stream);
extern CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
extern CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument);
extern CUresult cuEventCreate(CUevent *event, unsigned int flags);
extern CUresult cuEventRecord(CUevent event, CUstream stream);
extern CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event);
extern CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle);

#define NON_BLOCKING 1
#define WITHOUT_TIMING 2
#define INTERPROCESS 4
#define WORK_US 10000
#define WORDS (4u << 18) /* 4 MiB: memory that the agent moves */

#define NEED(call) \
    do { \
        CUresult rc = (call); \
        if (rc != CUDA_SUCCESS) { \
            fprintf(stderr, "line %d: %d\n", __LINE__, rc); \
            exit(20); \
        } \
    } while (0)

struct both {
    _Atomic(unsigned int) noted; /* by the maker's stream */
    unsigned int round, late;
};

static struct both *both;
static CUstream stream;
static CUdeviceptr memory;

static void start(void)
{
    CUcontext context;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    NEED(cuInit(0));
    NEED(cuDevicePrimaryCtxRetain(&context, 0));
    NEED(cuCtxSetCurrent(context));
    NEED(cuStreamCreate(&stream, NON_BLOCKING));
    NEED(cuMemAlloc_v2(&memory, WORDS * 4));
}

static void work_and_note(void *round)
{
    usleep(WORK_US);
    both->noted = (unsigned int)(size_t)round;
}

static void look(void *round)
{
    both->late = both->noted != (unsigned int)(size_t)round;
}

static void make(int socket)
{
    CUevent event;
    CUipcEventHandle handle;
    start();
    NEED(cuEventCreate(&event, WITHOUT_TIMING | INTERPROCESS));
    NEED(cuIpcGetEventHandle(&handle, event));
    if (write(socket, &handle, sizeof handle) != sizeof handle) exit(21);
    for (unsigned int round = 1;; round++) {
        char word;
        NEED(cuMemsetD32Async(memory, round, WORDS, stream));
        NEED(cuLaunchHostFunc(stream, work_and_note, (void *)(size_t)round));
        NEED(cuEventRecord(event, stream));
        if (write(socket, &round, sizeof round) != sizeof round || read(socket, &word, 1) != 1) exit(22);
    }
}

static void check_memory(unsigned int round)
{
    unsigned int first;
    NEED(cuMemcpyDtoH_v2(&first, memory + 4096, sizeof first));
    if (first != round) exit(24);
}

static void open_and_wait(int socket, int out)
{
    CUevent event;
    CUipcEventHandle handle;
    unsigned int round;
    start();
    if (read(socket, &handle, sizeof handle) != sizeof handle) exit(21);
    NEED(cuIpcOpenEventHandle(&event, handle));
    while (read(socket, &round, sizeof round) == sizeof round) {
        NEED(cuStreamWaitEvent(stream, event, 0));
        NEED(cuMemsetD32Async(memory, round, WORDS, stream));
        NEED(cuLaunchHostFunc(stream, look, (void *)(size_t)round));
        NEED(cuStreamSynchronize(stream));
        check_memory(round);
        dprintf(out, "step %u %s\n", round, both->late ? "WRONG" : "ok");
        if (write(socket, "x", 1) != 1) exit(23);
    }
}

int main(int count, char **words)
{
    int ends[2], status;
    int out = count > 1 ? open(words[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    both = mmap(NULL, sizeof *both, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (out < 0 || both == MAP_FAILED || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return 2;
    if (fork() == 0) make(ends[0]);
    if (fork() == 0) open_and_wait(ends[1], out);
    close(ends[0]);
    close(ends[1]);
    pid_t ended = wait(&status);
    fprintf(stderr, "process %d ended with %d\n", ended, status);
    return 1;
}
