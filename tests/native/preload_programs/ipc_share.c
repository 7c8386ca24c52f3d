/* Processes that share device memory by legacy IPC handles: `ipc_share SCENARIO [MIB]`.
 *
 * Each scenario prints what an application can see of it, one fact a line, and nothing that differs from run to run; so
 * the plain driver and the preload can be compared word for word. Content that is wrong ends the program with status 21,
 * a call that has to succeed and does not with 20. Importers are forked before CUDA is initialised. Called by
 * tests/native/test_preload_ipc.py on the software driver and by tests/gpu/ipc_run.py on a real one.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../../vgpu_preload/cuda_abi.h"

extern CUresult cuInit(unsigned int flags);
extern CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
extern CUresult cuCtxSetCurrent(CUcontext context);
extern CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
extern CUresult cuCtxDestroy_v2(CUcontext context);
extern CUresult cuCtxSynchronize(void);
extern CUresult cuMemGetInfo_v2(size_t *free, size_t *total);
extern CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
extern CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream);
extern CUresult cuMemFree_v2(CUdeviceptr address);
extern CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
extern CUresult cuMemHostAlloc(void **address, size_t size, unsigned int flags);
extern CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned int value, size_t count);
extern CUresult cuMemcpyDtoH_v2(void *host, CUdeviceptr address, size_t size);
extern CUresult cuMemcpyHtoD_v2(CUdeviceptr address, const void *host, size_t size);
extern CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address);
extern CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wanted,
                            unsigned long long flags);
extern CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags);
extern CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags);
extern CUresult cuMemUnmap(CUdeviceptr address, size_t size);
extern CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t count);
extern CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
extern CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address);
extern CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
extern CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags);
extern CUresult cuIpcCloseMemHandle(CUdeviceptr address);

#define MIB (1ULL << 20)
#define LAZY_ENABLE_PEER_ACCESS 1
#define WORDS 1024 /* are looked at in each place */

#define NEED(call) \
    do { \
        CUresult rc = (call); \
        if (rc != CUDA_SUCCESS) { \
            fprintf(stderr, "line %d: %d\n", __LINE__, rc); \
            exit(20); \
        } \
    } while (0)

static size_t bytes = 4 * MIB;
static CUcontext context;

static void start(void)
{
    NEED(cuInit(0));
    NEED(cuDevicePrimaryCtxRetain(&context, 0));
    NEED(cuCtxSetCurrent(context));
}

/* ---- content ---- */

static unsigned int word_of(unsigned int seed, size_t place)
{
    return seed * 2654435761U + (unsigned int)(place >> 10) * 40503U;
}

static void fill(CUdeviceptr address, size_t size, unsigned int seed)
{
    for (size_t place = 0; place < size; place += MIB) {
        size_t piece = size - place < MIB ? size - place : MIB;
        NEED(cuMemsetD32_v2(address + place, word_of(seed, place), piece / 4));
    }
    NEED(cuCtxSynchronize());
}

static void check(CUdeviceptr address, size_t size, unsigned int seed)
{
    unsigned int words[WORDS];
    for (size_t place = 0; place < size; place += MIB) {
        NEED(cuMemcpyDtoH_v2(words, address + place, sizeof words));
        for (int n = 0; n < WORDS; n++)
            if (words[n] != word_of(seed, place)) {
                fprintf(stderr, "process %d: wrong word %d at %zu\n", getpid(), n, place);
                exit(21);
            }
    }
}

/* ---- processes ---- */

struct importer {
    int socket;
    pid_t process;
};

struct message {
    CUipcMemHandle handle;
    size_t size;
    long number;
};

static void tell(int socket, const struct message *message)
{
    if (send(socket, message, sizeof *message, MSG_NOSIGNAL) != sizeof *message) exit(22);
}

static struct message hear(int socket)
{
    struct message message = {.number = -1};
    if (recv(socket, &message, sizeof message, 0) != sizeof message) exit(23);
    return message;
}

static void tell_number(int socket, long number)
{
    tell(socket, &(struct message){.number = number});
}

/* The child does its part and ends; the parent learns of a failure in `join`. */
static struct importer begin(void (*part)(int socket))
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) exit(24);
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        part(ends[1]);
        fflush(stdout);
        _exit(0);
    }
    close(ends[1]);
    return (struct importer){.socket = ends[0], .process = process};
}

static void join(struct importer importer)
{
    int status = 0;
    waitpid(importer.process, &status, 0);
    if (status != 0) exit(WIFEXITED(status) ? WEXITSTATUS(status) : 25);
    close(importer.socket);
}

static CUresult open_memory(CUdeviceptr *address, const CUipcMemHandle *handle)
{
    return cuIpcOpenMemHandle_v2(address, *handle, LAZY_ENABLE_PEER_ACCESS);
}

static struct message offer(CUdeviceptr address, size_t size)
{
    struct message message = {.size = size};
    NEED(cuIpcGetMemHandle(&message.handle, address));
    return message;
}

static CUdeviceptr allocate(size_t size, unsigned int seed)
{
    CUdeviceptr address;
    NEED(cuMemAlloc_v2(&address, size));
    fill(address, size, seed);
    return address;
}

/* ---- both write, both see ---- */

static void share_importer(int socket)
{
    CUdeviceptr address;
    start();
    struct message offered = hear(socket);
    NEED(open_memory(&address, &offered.handle));
    check(address, offered.size, 1);
    fill(address, offered.size, 2);
    tell_number(socket, 0);
    hear(socket);
    check(address, offered.size, 3);
    NEED(cuIpcCloseMemHandle(address));
    tell_number(socket, 0);
}

static void share(void)
{
    struct importer importer = begin(share_importer);
    start();
    CUdeviceptr address = allocate(bytes, 1);
    struct message offered = offer(address, bytes);
    tell(importer.socket, &offered);
    hear(importer.socket);
    check(address, bytes, 2);
    fill(address, bytes, 3);
    tell_number(importer.socket, 0);
    hear(importer.socket);
    join(importer);
    check(address, bytes, 3);
    NEED(cuMemFree_v2(address));
    printf("content seen both ways\n");
}

static void two_importers(void)
{
    struct importer first = begin(share_importer), second = begin(share_importer);
    struct importer *both[] = {&first, &second};
    start();
    CUdeviceptr address = allocate(bytes, 1);
    struct message offered = offer(address, bytes);
    for (int n = 0; n < 2; n++) {
        fill(address, bytes, 1);
        tell(both[n]->socket, &offered);
        hear(both[n]->socket);
        check(address, bytes, 2);
    }
    fill(address, bytes, 3);
    for (int n = 0; n < 2; n++) tell_number(both[n]->socket, 0);
    for (int n = 0; n < 2; n++) hear(both[n]->socket), join(*both[n]);
    NEED(cuMemFree_v2(address));
    printf("two importers saw it\n");
}

/* ---- what the calls answer ---- */

static void say(const char *what, long answer)
{
    printf("%s: %ld\n", what, answer);
}

/* Asked for neither base nor size, the driver need not look; asked for both it has to. */
static void say_whose(const char *what, CUdeviceptr address)
{
    CUdeviceptr base;
    size_t size;
    say(what, cuMemGetAddressRange_v2(NULL, NULL, address));
    say("its range", cuMemGetAddressRange_v2(&base, &size, address));
}

static void faults_importer(int socket)
{
    CUdeviceptr address = 0, again = 0;
    CUipcMemHandle handle, damaged = {{0}};
    start();
    struct message offered = hear(socket), freed = hear(socket), mine;
    say("open zeros", open_memory(&address, &damaged));
    memset(&damaged, 0x5a, sizeof damaged);
    say("open garbage", open_memory(&address, &damaged));
    say("open memory that was freed", open_memory(&address, &freed.handle));
    say("open without the flag", cuIpcOpenMemHandle_v2(&address, offered.handle, 0));
    say("open with another flag", cuIpcOpenMemHandle_v2(&address, offered.handle, 2));
    say("open into nowhere", cuIpcOpenMemHandle_v2(NULL, offered.handle, LAZY_ENABLE_PEER_ACCESS));
    NEED(cuCtxSetCurrent(NULL));
    say("open without a context", open_memory(&address, &offered.handle));
    NEED(cuCtxSetCurrent(context));
    say("open", open_memory(&address, &offered.handle));
    say("open again", open_memory(&again, &offered.handle));
    say("at the same address", again == address);
    say("close an address inside", cuIpcCloseMemHandle(address + 4096));
    say("free what was opened", cuMemFree_v2(address));
    say("handle of what was opened", cuIpcGetMemHandle(&handle, address));
    say("close", cuIpcCloseMemHandle(address));
    check(address, offered.size, 1);
    NEED(cuCtxSetCurrent(NULL));
    say("close without a context", cuIpcCloseMemHandle(address));
    NEED(cuCtxSetCurrent(context));
    say("close the last", cuIpcCloseMemHandle(address));
    say("close once more", cuIpcCloseMemHandle(address));
    say_whose("the address is free", address);
    say("open a third time", open_memory(&address, &offered.handle));
    check(address, offered.size, 1);
    say("close the third", cuIpcCloseMemHandle(address));
    NEED(cuMemAlloc_v2(&again, bytes));
    say("close what is the process's own", cuIpcCloseMemHandle(again));
    mine = offer(again, bytes);
    say("open one's own", open_memory(&address, &mine.handle));
    say("handle of an address inside", cuIpcGetMemHandle(&handle, again + bytes / 2));
    say("is the same handle", memcmp(&handle, &mine.handle, sizeof handle) == 0);
    say("handle into nowhere", cuIpcGetMemHandle(NULL, again));
    say("handle behind the end", cuIpcGetMemHandle(&handle, again + bytes));
    say("handle of nothing", cuIpcGetMemHandle(&handle, 0));
    NEED(cuMemFree_v2(again));
    say("handle of freed memory", cuIpcGetMemHandle(&handle, again));
    damaged = offered.handle; /* last: a driver that does not look at this byte opens the memory a second time */
    damaged.reserved[29] ^= 1;
    say("open a damaged handle", open_memory(&address, &damaged));
    tell_number(socket, 0);
}

static void refused_kinds(void)
{
    CUmemAllocationProp wanted = {.type = 1, .requestedHandleTypes = 1, .location = {.type = 1}};
    CUmemAccessDesc access = {.location = {.type = 1}, .flags = 3};
    CUmemGenericAllocationHandle physical;
    CUdeviceptr address, pooled;
    CUipcMemHandle handle;
    void *host;
    NEED(cuMemCreate(&physical, 4 * MIB, &wanted, 0));
    NEED(cuMemAddressReserve(&address, 4 * MIB, 0, 0, 0));
    NEED(cuMemMap(address, 4 * MIB, 0, physical, 0));
    NEED(cuMemSetAccess(address, 4 * MIB, &access, 1));
    say("handle of VMM memory", cuIpcGetMemHandle(&handle, address));
    NEED(cuMemAllocAsync(&pooled, 4 * MIB, NULL));
    say("handle of pool memory", cuIpcGetMemHandle(&handle, pooled));
    NEED(cuMemFreeAsync(pooled, NULL));
    NEED(cuMemHostAlloc(&host, 4096, 0));
    say("handle of host memory", cuIpcGetMemHandle(&handle, (CUdeviceptr)(size_t)host));
}

static void faults(void)
{
    struct importer importer = begin(faults_importer);
    start();
    CUdeviceptr address = allocate(bytes, 1), other = allocate(bytes, 2);
    struct message offered = offer(address, bytes), freed = offer(other, bytes);
    say("two handles differ", memcmp(&offered.handle, &freed.handle, sizeof freed.handle) != 0);
    NEED(cuMemFree_v2(other));
    tell(importer.socket, &offered);
    tell(importer.socket, &freed);
    hear(importer.socket);
    join(importer);
    refused_kinds();
    NEED(cuCtxSetCurrent(NULL));
    say("handle without a context", cuIpcGetMemHandle(&freed.handle, address));
    NEED(cuCtxSetCurrent(context));
    NEED(cuMemFree_v2(address));
    other = allocate(bytes, 3);
    freed = offer(other, bytes);
    say("new memory has a new handle", memcmp(&offered.handle, &freed.handle, sizeof freed.handle) != 0);
}

static void say_attribute(const char *what, CUpointer_attribute attribute, CUdeviceptr address, CUdeviceptr base)
{
    unsigned long long value = 0;
    CUresult rc = cuPointerGetAttribute(&value, attribute, address);
    printf("%s: %d %lld\n", what, rc, rc == 0 ? (long long)(value - base) : 0);
}

static void say_facts(CUdeviceptr address)
{
    CUdeviceptr base = 0, inside = address + 12345;
    CUmemGenericAllocationHandle physical;
    CUcontext owner = NULL;
    size_t size = 0;
    say("address range", cuMemGetAddressRange_v2(&base, &size, inside));
    say("base", (long)(base - address));
    say("size", (long)(size - bytes));
    say("its context", cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, inside) == 0 && owner == context);
    say_attribute("memory type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside, 0);
    say_attribute("host pointer", CU_POINTER_ATTRIBUTE_HOST_POINTER, inside, 0);
    say_attribute("managed", CU_POINTER_ATTRIBUTE_IS_MANAGED, inside, 0);
    say_attribute("device", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside, 0);
    say_attribute("can be shared by handle", CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, inside, 0);
    say_attribute("start", CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside, address);
    say_attribute("length", CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside, bytes);
    say_attribute("mapped", CU_POINTER_ATTRIBUTE_MAPPED, inside, 0);
    say_attribute("handle types", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, inside, 0);
    say_attribute("pool", CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, inside, 0);
    say("unmap", cuMemUnmap(address, 4 * MIB));
    say("retain", cuMemRetainAllocationHandle(&physical, (void *)(size_t)address));
}

static void facts_importer(int socket)
{
    CUdeviceptr address;
    start();
    struct message offered = hear(socket);
    NEED(open_memory(&address, &offered.handle));
    printf("opened memory\n");
    say_facts(address);
    NEED(cuIpcCloseMemHandle(address));
    tell_number(socket, 0);
}

static void facts(void)
{
    bytes += 4096; /* not a multiple of what the preload rounds to */
    struct importer importer = begin(facts_importer);
    start();
    CUdeviceptr address = allocate(bytes, 1);
    struct message offered = offer(address + bytes / 2, bytes);
    tell(importer.socket, &offered);
    hear(importer.socket);
    join(importer);
    printf("offered memory\n");
    say_facts(address);
}

/* ---- the other side goes ---- */

/* As PyTorch's queues: the consumer opens, looks, closes; then the producer frees. */
static void queue_importer(int socket)
{
    CUdeviceptr address;
    start();
    tell_number(socket, 0);
    for (unsigned int round = 0; round < 20; round++) {
        struct message offered = hear(socket);
        NEED(open_memory(&address, &offered.handle));
        check(address, offered.size, round);
        fill(address, offered.size, round + 100);
        NEED(cuIpcCloseMemHandle(address));
        tell_number(socket, 0);
    }
}

static void queue(void)
{
    struct importer importer = begin(queue_importer);
    size_t before, after, total;
    start();
    hear(importer.socket);
    NEED(cuMemFree_v2(allocate(bytes, 0)));
    NEED(cuMemGetInfo_v2(&before, &total));
    for (unsigned int round = 0; round < 20; round++) {
        CUdeviceptr address = allocate(bytes, round);
        struct message offered = offer(address + round * 4096, bytes);
        tell(importer.socket, &offered);
        hear(importer.socket);
        check(address, bytes, round + 100);
        NEED(cuMemFree_v2(address));
    }
    NEED(cuMemGetInfo_v2(&after, &total));
    join(importer);
    say("memory lost", (long)(before - after));
}

static void freed_importer(int socket)
{
    CUdeviceptr address;
    start();
    struct message offered = hear(socket);
    NEED(open_memory(&address, &offered.handle));
    tell_number(socket, 0);
    hear(socket);
    check(address, offered.size, 1);
    NEED(cuIpcCloseMemHandle(address));
    say("open what was freed", open_memory(&address, &offered.handle));
    tell_number(socket, 0);
}

/* Undefined with the plain driver; here the memory lives until it is closed. */
static void freed(void)
{
    struct importer importer = begin(freed_importer);
    start();
    CUdeviceptr address = allocate(bytes, 1);
    struct message offered = offer(address, bytes);
    tell(importer.socket, &offered);
    hear(importer.socket);
    NEED(cuMemFree_v2(address));
    allocate(bytes, 7);
    tell_number(importer.socket, 0);
    hear(importer.socket);
    join(importer);
}

static void exporter(int socket)
{
    start();
    struct message offered = offer(allocate(bytes, 1), bytes);
    tell(socket, &offered);
    recv(socket, &offered, sizeof offered, 0);
}

static void forking_exporter(int socket)
{
    start();
    struct message offered = offer(allocate(bytes, 1), bytes);
    /* The child says nothing and does nothing: it only has what fork left it. */
    offered.number = fork();
    if (offered.number == 0) {
        alarm(60); /* nobody may be left to end it */
        for (close(socket);;) pause();
    }
    tell(socket, &offered);
    recv(socket, &offered, sizeof offered, 0);
}

static void replaced_exporter(int socket)
{
    start();
    struct message offered = offer(allocate(bytes, 1), bytes);
    tell(socket, &offered);
    recv(socket, &offered, sizeof offered, 0);
    execlp("sleep", "sleep", "30", (char *)NULL);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* The exporter is `part`; it goes by being told to, or by force. */
static void without_exporter(void (*part)(int socket), bool is_forced)
{
    struct importer other = begin(part);
    CUdeviceptr address, again;
    struct message offered = hear(other.socket);
    start();
    NEED(open_memory(&address, &offered.handle));
    check(address, bytes, 1);
    if (is_forced)
        kill(other.process, SIGKILL);
    else
        tell_number(other.socket, 0);
    if (part == replaced_exporter)
        usleep(300000);
    else
        waitpid(other.process, NULL, 0);
    check(address, bytes, 1);
    fill(address, bytes, 4);
    check(address, bytes, 4);
    NEED(cuIpcCloseMemHandle(address));
    double begun = now();
    say("open without the exporter", open_memory(&again, &offered.handle));
    say("at once", now() - begun < 3);
    if (part == replaced_exporter) kill(other.process, SIGKILL);
}

static void exporter_ends(void) { without_exporter(exporter, false); }
static void exporter_is_killed(void) { without_exporter(exporter, true); }
static void exporter_is_replaced(void) { without_exporter(replaced_exporter, false); }

static void exporter_forks(void)
{
    struct importer other = begin(forking_exporter);
    CUdeviceptr address, again;
    struct message offered = hear(other.socket);
    start();
    for (int n = 0; n < 3; n++) {
        NEED(open_memory(&address, &offered.handle));
        check(address, bytes, 1);
        NEED(cuIpcCloseMemHandle(address));
    }
    tell_number(other.socket, 0);
    waitpid(other.process, NULL, 0);
    double begun = now();
    say("open without the exporter", open_memory(&again, &offered.handle));
    say("at once", now() - begun < 3);
    kill((pid_t)offered.number, SIGKILL);
}

static void exporter_is_stopped(void)
{
    struct importer other = begin(exporter);
    CUdeviceptr address;
    struct message offered = hear(other.socket);
    start();
    kill(other.process, SIGSTOP);
    if (fork() == 0) {
        usleep(400000);
        kill(other.process, SIGCONT);
        _exit(0);
    }
    NEED(open_memory(&address, &offered.handle));
    check(address, bytes, 1);
    NEED(cuIpcCloseMemHandle(address));
    tell_number(other.socket, 0);
    join(other);
    printf("opened in the end\n");
}

/* ---- many ---- */

#define MANY 1000

static void many_importer(int socket)
{
    static CUdeviceptr addresses[MANY];
    start();
    for (unsigned int n = 0; n < MANY; n++) {
        struct message offered = hear(socket);
        NEED(open_memory(&addresses[n], &offered.handle));
    }
    for (unsigned int n = 0; n < MANY; n++) {
        check(addresses[n], bytes, n);
        NEED(cuIpcCloseMemHandle(addresses[n]));
    }
    tell_number(socket, 0);
}

static void many(void)
{
    static CUdeviceptr addresses[MANY];
    struct importer importer = begin(many_importer);
    start();
    for (unsigned int n = 0; n < MANY; n++) {
        addresses[n] = allocate(bytes, n);
        struct message offered = offer(addresses[n], bytes);
        tell(importer.socket, &offered);
    }
    hear(importer.socket);
    join(importer);
    for (unsigned int n = 0; n < MANY; n++) NEED(cuMemFree_v2(addresses[n]));
    printf("%d handles\n", MANY);
}

/* ---- many threads ---- */

#define THREADS 8
#define HANDLES 6

static struct message offers[HANDLES];

static void *open_and_close(void *argument)
{
    unsigned int seed = (unsigned int)(size_t)argument;
    NEED(cuCtxSetCurrent(context));
    for (int round = 0; round < 100; round++) {
        unsigned int n = (seed = seed * 1664525U + 1013904223U) >> 16, which = n % HANDLES;
        CUdeviceptr address, again = 0;
        NEED(open_memory(&address, &offers[which].handle));
        if (n & 64) NEED(open_memory(&again, &offers[which].handle));
        if (again != 0 && again != address) exit(26);
        check(address, offers[which].size, which);
        NEED(cuIpcCloseMemHandle(address));
        if (again != 0) NEED(cuIpcCloseMemHandle(again));
    }
    return NULL;
}

static void threads_importer(int socket)
{
    pthread_t threads[THREADS];
    start();
    for (int n = 0; n < HANDLES; n++) offers[n] = hear(socket);
    for (size_t n = 0; n < THREADS; n++) pthread_create(&threads[n], NULL, open_and_close, (void *)(n + 1));
    for (size_t n = 0; n < THREADS; n++) pthread_join(threads[n], NULL);
    for (int n = 0; n < HANDLES; n++) {
        CUdeviceptr address;
        NEED(open_memory(&address, &offers[n].handle));
        NEED(cuIpcCloseMemHandle(address));
        say("still open", cuIpcCloseMemHandle(address) == 0);
    }
    tell_number(socket, 0);
}

static void *offer_all(void *addresses)
{
    NEED(cuCtxSetCurrent(context));
    for (int round = 0; round < 50; round++)
        for (int n = 0; n < HANDLES; n++) {
            struct message again = offer(((CUdeviceptr *)addresses)[n], bytes);
            if (memcmp(&again.handle, &offers[n].handle, sizeof again.handle) != 0) exit(27);
        }
    return NULL;
}

static void threads(void)
{
    struct importer first = begin(threads_importer);
    CUdeviceptr addresses[HANDLES];
    pthread_t helpers[2];
    start();
    for (unsigned int n = 0; n < HANDLES; n++) {
        addresses[n] = allocate(bytes, n);
        offers[n] = offer(addresses[n], bytes);
        tell(first.socket, &offers[n]);
    }
    for (int n = 0; n < 2; n++) pthread_create(&helpers[n], NULL, offer_all, addresses);
    for (int n = 0; n < 2; n++) pthread_join(helpers[n], NULL);
    hear(first.socket);
    join(first);
    for (int n = 0; n < HANDLES; n++) NEED(cuMemFree_v2(addresses[n]));
    printf("%d threads\n", THREADS);
}

/* ---- contexts ---- */

static void contexts_importer(int socket)
{
    CUcontext other;
    CUdeviceptr address, again;
    start();
    struct message offered = hear(socket);
    NEED(cuCtxCreate_v2(&other, 0, 0));
    NEED(open_memory(&address, &offered.handle));
    check(address, offered.size, 1);
    NEED(cuCtxDestroy_v2(other));
    NEED(cuCtxSetCurrent(context));
    say_whose("after its context", address);
    NEED(open_memory(&again, &offered.handle));
    check(again, offered.size, 1);
    NEED(cuIpcCloseMemHandle(again));
    tell_number(socket, 0);
}

static void contexts(void)
{
    struct importer importer = begin(contexts_importer);
    start();
    struct message offered = offer(allocate(bytes, 1), bytes);
    tell(importer.socket, &offered);
    hear(importer.socket);
    join(importer);
}

static const struct scenario {
    const char *name;
    void (*run)(void);
} scenarios[] = {
    {"share", share},
    {"two-importers", two_importers},
    {"faults", faults},
    {"facts", facts},
    {"queue", queue},
    {"freed", freed},
    {"exporter-ends", exporter_ends},
    {"exporter-is-killed", exporter_is_killed},
    {"exporter-is-replaced", exporter_is_replaced},
    {"exporter-forks", exporter_forks},
    {"exporter-is-stopped", exporter_is_stopped},
    {"many", many},
    {"threads", threads},
    {"contexts", contexts},
};

int main(int count, char **words)
{
    if (count > 2) bytes = strtoul(words[2], NULL, 10) * MIB;
    for (size_t n = 0; count > 1 && n < sizeof scenarios / sizeof *scenarios; n++) {
        if (strcmp(scenarios[n].name, words[1]) != 0) continue;
        scenarios[n].run();
        fflush(stdout);
        return 0;
    }
    for (size_t n = 0; n < sizeof scenarios / sizeof *scenarios; n++) printf("%s\n", scenarios[n].name);
    return 2;
}
