/* Three processes that share memory by descriptor and by legacy handle and never stop using it: `group_share`.
 *
 * Each fills a part of its own in both kinds of memory again and again and checks it; the importers also open, import,
 * check and close more of the same all the time. When its standard input ends they stop, and each checks what the others
 * wrote last, through its own mapping. Content that is wrong ends the program with status 21, a call that has to succeed
 * and does not with 20. Called by tests/native/test_preload_group.py, which takes all memory away meanwhile.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
extern CUresult cuMemcpyDtoHAsync_v2(void *host, CUdeviceptr address, size_t size, CUstream stream);
extern CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
extern CUresult cuStreamSynchronize(CUstream stream);
extern CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wanted,
                            unsigned long long flags);
extern CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
extern CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags);
extern CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
extern CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags);
extern CUresult cuMemUnmap(CUdeviceptr address, size_t size);
extern CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t count);
extern CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags);
extern CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *in,
                                               CUmemAllocationHandleType type);
extern CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
extern CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags);
extern CUresult cuIpcCloseMemHandle(CUdeviceptr address);

#define MIB (1ULL << 20)
#define BYTES (8 * MIB)
#define PROCESSES 3
#define KEPT_PART (7 * MIB) /* nobody changes it: who comes late finds it */
#define KEPT_VALUE 0x5eedU
#define WORDS 1024

#define NEED(call) \
    do { \
        CUresult rc = (call); \
        if (rc != CUDA_SUCCESS) { \
            fprintf(stderr, "process %d, line %d: %d\n", getpid(), __LINE__, rc); \
            exit(20); \
        } \
    } while (0)

struct shared {
    CUipcMemHandle handle;
    int descriptor;
};

struct part_of {
    unsigned int process;
    CUdeviceptr memory[2]; /* by descriptor, by handle */
    unsigned int last[2];  /* what it wrote last */
};

static CUcontext context;
static struct shared shared;
static atomic_bool is_over;

static void start(void)
{
    NEED(cuInit(0));
    NEED(cuDevicePrimaryCtxRetain(&context, 0));
    NEED(cuCtxSetCurrent(context));
}

static CUstream stream_of_thread(void)
{
    CUstream stream;
    NEED(cuCtxSetCurrent(context));
    NEED(cuStreamCreate(&stream, 1));
    return stream;
}

static void check(CUdeviceptr address, unsigned int value, CUstream stream)
{
    static _Thread_local unsigned int words[WORDS];
    size_t places[] = {0, MIB - sizeof words};
    for (int n = 0; n < 2; n++) {
        NEED(cuMemcpyDtoHAsync_v2(words, address + places[n], sizeof words, stream));
        NEED(cuStreamSynchronize(stream));
        for (int word = 0; word < WORDS; word++)
            if (words[word] != value) {
                fprintf(stderr, "process %d: %x at %llx, not %x\n", getpid(), words[word], address, value);
                exit(21);
            }
    }
}

static CUdeviceptr map_memory(CUmemGenericAllocationHandle handle)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}, .flags = 3};
    CUdeviceptr address;
    NEED(cuMemAddressReserve(&address, BYTES, 0, 0, 0));
    NEED(cuMemMap(address, BYTES, 0, handle, 0));
    NEED(cuMemSetAccess(address, BYTES, &access, 1));
    return address;
}

static CUmemGenericAllocationHandle import_memory(void)
{
    CUmemGenericAllocationHandle handle;
    NEED(cuMemImportFromShareableHandle(&handle, (void *)(size_t)shared.descriptor, 1));
    return handle;
}

static void *rewrite(void *argument)
{
    struct part_of *part = argument;
    CUstream stream = stream_of_thread();
    for (unsigned int round = 1; !is_over; round++)
        for (int way = 0; way < 2; way++) {
            CUdeviceptr own = part->memory[way] + part->process * MIB;
            part->last[way] = round * 2654435761U + part->process;
            NEED(cuMemsetD32Async(own, part->last[way], MIB / 4, stream));
            check(own, part->last[way], stream);
        }
    return NULL;
}

static void *come_and_go(void *unused)
{
    (void)unused;
    CUstream stream = stream_of_thread();
    while (!is_over) {
        CUmemGenericAllocationHandle handle = import_memory();
        CUdeviceptr mapped = map_memory(handle), opened;
        NEED(cuMemRelease(handle));
        check(mapped + KEPT_PART, KEPT_VALUE, stream);
        NEED(cuMemUnmap(mapped, BYTES));
        NEED(cuMemAddressFree(mapped, BYTES));
        NEED(cuIpcOpenMemHandle_v2(&opened, shared.handle, 1));
        check(opened + KEPT_PART, KEPT_VALUE, stream);
        NEED(cuIpcCloseMemHandle(opened));
    }
    return NULL;
}

static void work(struct part_of *part, bool is_importer, int end)
{
    pthread_t threads[2];
    char byte;
    pthread_create(&threads[0], NULL, rewrite, part);
    if (is_importer) pthread_create(&threads[1], NULL, come_and_go, NULL);
    if (read(end, &byte, 1) < 0) exit(22);
    is_over = true;
    for (int n = 0; n < 1 + is_importer; n++) pthread_join(threads[n], NULL);
}

static void send_shared(int socket)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control = {.bytes = {0}};
    struct iovec piece = {.iov_base = &shared, .iov_len = sizeof shared};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(header), &shared.descriptor, sizeof(int));
    if (sendmsg(socket, &message, MSG_NOSIGNAL) != sizeof shared) exit(23);
}

static void receive_shared(int socket)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control;
    struct iovec piece = {.iov_base = &shared, .iov_len = sizeof shared};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(socket, &message, 0) != sizeof shared) exit(24);
    memcpy(&shared.descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
}

/* All three know what all three wrote last, and look. */
static void check_all(const struct part_of *own, const struct part_of parts[PROCESSES])
{
    CUstream stream = stream_of_thread();
    for (int way = 0; way < 2; way++) {
        for (unsigned int n = 0; n < PROCESSES; n++) check(own->memory[way] + n * MIB, parts[n].last[way], stream);
        check(own->memory[way] + KEPT_PART, KEPT_VALUE, stream);
    }
}

static void importer(unsigned int number, int socket)
{
    struct part_of part = {.process = number}, parts[PROCESSES];
    receive_shared(socket);
    start();
    part.memory[0] = map_memory(import_memory());
    NEED(cuIpcOpenMemHandle_v2(&part.memory[1], shared.handle, 1));
    if (write(socket, "", 1) != 1) exit(25);
    work(&part, true, socket);
    if (write(socket, &part, sizeof part) != sizeof part) exit(25);
    if (read(socket, parts, sizeof parts) != sizeof parts) exit(25);
    check_all(&part, parts);
}

static int begin(unsigned int number)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) exit(26);
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        importer(number, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    return ends[0];
}

static void make_shared(struct part_of *part)
{
    CUmemAllocationProp wanted = {
        .type = 1, .requestedHandleTypes = 1, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemGenericAllocationHandle handle;
    CUstream stream = stream_of_thread();
    NEED(cuMemCreate(&handle, BYTES, &wanted, 0));
    part->memory[0] = map_memory(handle);
    NEED(cuMemAlloc_v2(&part->memory[1], BYTES));
    for (int way = 0; way < 2; way++) {
        NEED(cuMemsetD32Async(part->memory[way] + KEPT_PART, KEPT_VALUE, MIB / 4, stream));
        check(part->memory[way] + KEPT_PART, KEPT_VALUE, stream);
    }
    NEED(cuMemExportToShareableHandle(&shared.descriptor, handle, 1, 0));
    NEED(cuIpcGetMemHandle(&shared.handle, part->memory[1]));
}

int main(void)
{
    struct part_of parts[PROCESSES] = {{.process = 0}};
    int sockets[PROCESSES], status = 0;
    char byte;
    for (unsigned int n = 1; n < PROCESSES; n++) sockets[n] = begin(n);
    start();
    make_shared(&parts[0]);
    for (unsigned int n = 1; n < PROCESSES; n++) {
        send_shared(sockets[n]);
        if (read(sockets[n], &byte, 1) != 1) return 27;
    }
    if (write(STDOUT_FILENO, "ready\n", 6) != 6) return 27;
    work(&parts[0], false, STDIN_FILENO);
    for (unsigned int n = 1; n < PROCESSES; n++)
        if (write(sockets[n], "", 1) != 1 || read(sockets[n], &parts[n], sizeof parts[n]) != sizeof parts[n]) return 27;
    for (unsigned int n = 1; n < PROCESSES; n++)
        if (write(sockets[n], parts, sizeof parts) != sizeof parts) return 27;
    check_all(&parts[0], parts);
    while (wait(&status) > 0)
        if (status != 0) return WIFEXITED(status) ? WEXITSTATUS(status) : 28;
    return 0;
}
