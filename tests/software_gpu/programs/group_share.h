/* Memory that ranks of `ring` give each other: by a POSIX descriptor over a Unix socket, or by a legacy IPC handle.
 *
 * The sockets are made before the ranks are forked, one pair for each two; a rank that needs no more of them closes them, so that
 * a checkpoint of one process finds none. Waiting for a peer ends after two minutes.
 */
#ifndef GROUP_SHARE_H
#define GROUP_SHARE_H

#include <poll.h>
#include <sys/socket.h>

#include "group_gpu.h"

#define HEAR_MS 120000

enum way { BY_DESCRIPTOR, BY_HANDLE };

struct shared { CUdeviceptr address; size_t bytes; enum way way; bool is_import; int fd; }; /* fd: 0 when none is kept */

struct message { enum way way; size_t bytes; word number; struct ipc_handle handle; };

static int mesh[MOST_RANKS][MOST_RANKS]; /* [a][b]: the end of a towards b; -1: none */

static void mesh_make(int ranks)
{
    memset(mesh, -1, sizeof mesh);
    for (int a = 0; a < ranks; a++)
        for (int b = a + 1; b < ranks; b++) {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail(2, "socketpair: %s\n", strerror(errno));
            mesh[a][b] = ends[0];
            mesh[b][a] = ends[1];
        }
}

static void mesh_close(int number)
{
    for (int peer = 0; peer < MOST_RANKS; peer++) {
        if (mesh[number][peer] >= 0) close(mesh[number][peer]);
        mesh[number][peer] = -1;
    }
}

static void mesh_close_others(int number)
{
    for (int other = 0; other < MOST_RANKS; other++)
        if (other != number) mesh_close(other);
}

static void tell(int socket, const struct message *message, int fd)
{
    char space[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec content = {(void *)message, sizeof *message};
    struct msghdr header = {.msg_iov = &content, .msg_iovlen = 1};
    if (fd >= 0) {
        header.msg_control = space;
        header.msg_controllen = sizeof space;
        struct cmsghdr *control = CMSG_FIRSTHDR(&header);
        control->cmsg_level = SOL_SOCKET;
        control->cmsg_type = SCM_RIGHTS;
        control->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(control), &fd, sizeof fd);
    }
    if (sendmsg(socket, &header, MSG_NOSIGNAL) != sizeof *message) fail(4, "a peer is gone: %s\n", strerror(errno));
}

static struct message hear(int socket, int *fd)
{
    struct message message = {0};
    char space[CMSG_SPACE(sizeof *fd)];
    struct iovec content = {&message, sizeof message};
    struct msghdr header = {.msg_iov = &content, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct pollfd waiting = {socket, POLLIN, 0};
    *fd = -1;
    if (poll(&waiting, 1, HEAR_MS) != 1) fail(4, "a peer says nothing\n");
    if (recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_WAITALL) != sizeof message) fail(4, "a peer is gone\n");
    struct cmsghdr *control = CMSG_FIRSTHDR(&header);
    if (control && control->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(control), sizeof *fd);
    return message;
}

static void tell_number(const struct rank *rank, int peer, word number) { tell(mesh[rank->number][peer], &(struct message){.number = number}, -1); }

static word hear_number(const struct rank *rank, int peer)
{
    int fd;
    return hear(mesh[rank->number][peer], &fd).number;
}

/* --share: fd, handle, or mixed, where every other rank takes handles. */
static enum way way_of(const struct rank *rank)
{
    if (!strcmp(rank->options->share, "mixed")) return rank->number % 2 ? BY_HANDLE : BY_DESCRIPTOR;
    return strcmp(rank->options->share, "handle") ? BY_DESCRIPTOR : BY_HANDLE;
}

static CUdeviceptr map_handle(const struct rank *rank, CUmemGenericAllocationHandle handle, size_t bytes)
{
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, rank->device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CHECK(cuMemMap(address, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(address, bytes, &access, 1));
    CHECK(cuMemRelease(handle));
    return address;
}

static struct shared shared_make(const struct rank *rank, size_t bytes)
{
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                  .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                  .location = {CU_MEM_LOCATION_TYPE_DEVICE, rank->device}};
    struct shared shared = {.bytes = (bytes + GROUP_GRANULARITY - 1) / GROUP_GRANULARITY * GROUP_GRANULARITY, .way = way_of(rank)};
    CUmemGenericAllocationHandle handle;
    if (shared.way == BY_HANDLE) {
        shared.address = allocate(shared.bytes);
        return shared;
    }
    CHECK(cuMemCreate(&handle, shared.bytes, &wanted, 0));
    shared.address = map_handle(rank, handle, shared.bytes);
    CHECK(cuMemsetD8_v2(shared.address, 0, shared.bytes));
    return shared;
}

static void shared_offer(const struct rank *rank, const struct shared *shared, int peer)
{
    struct message message = {.way = shared->way, .bytes = shared->bytes};
    CUmemGenericAllocationHandle handle;
    int fd = -1;
    if (shared->way == BY_HANDLE) CHECK(cuIpcGetMemHandle(&message.handle, shared->address));
    else {
        CHECK(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)shared->address));
        CHECK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        CHECK(cuMemRelease(handle));
    }
    if (fd >= 0) come_late(rank, "has exported", rank->options->send_late_ms);
    tell(mesh[rank->number][peer], &message, fd);
    if (fd >= 0 && !rank->options->hold) close(fd);
}

static struct shared shared_take(const struct rank *rank, int peer)
{
    CUmemGenericAllocationHandle handle;
    int fd;
    come_late(rank, "has not received", rank->options->take_late_ms);
    struct message message = hear(mesh[rank->number][peer], &fd);
    struct shared shared = {.bytes = message.bytes, .way = message.way, .is_import = true};
    if (message.way == BY_HANDLE) {
        CHECK(cuIpcOpenMemHandle_v2(&shared.address, message.handle, LAZY_ENABLE_PEER_ACCESS));
        return shared;
    }
    CHECK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    if (rank->options->hold) shared.fd = fd;
    else close(fd);
    shared.address = map_handle(rank, handle, shared.bytes);
    return shared;
}

/* --hold: the descriptor that was kept still is of the memory that is mapped; the word at `place` is this rank's alone. */
static void shared_check(const struct rank *rank, const struct shared *shared, size_t place, word step)
{
    CUmemGenericAllocationHandle handle;
    if (!shared->is_import || shared->fd <= 0) return;
    CHECK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)shared->fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    CUdeviceptr again = map_handle(rank, handle, shared->bytes);
    write_word(again + place, step);
    CHECK(cuMemcpyDtoHAsync_v2(rank->host, shared->address + place, 8, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    if (rank->host[0] != step) report_wrong(rank, step, "descriptor", place, rank->host[0], step);
    CHECK(cuMemUnmap(again, shared->bytes));
    CHECK(cuMemAddressFree(again, shared->bytes));
}

/* No work may use it any more. */
static void shared_drop(const struct shared *shared)
{
    if (shared->fd > 0) close(shared->fd);
    if (shared->way == BY_DESCRIPTOR) {
        CHECK(cuMemUnmap(shared->address, shared->bytes));
        CHECK(cuMemAddressFree(shared->address, shared->bytes));
    } else if (shared->is_import) CHECK(cuIpcCloseMemHandle(shared->address));
    else CHECK(cuMemFree_v2(shared->address));
}

#endif
