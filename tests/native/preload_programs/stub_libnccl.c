/* A stand-in for libnccl.so.2 with the habits of NCCL that matter to whoever wraps it: handles that come late, exported
 * functions that call one another, communicators that another NCCL must not be given. It moves no data.
 * STUB_NCCL_VERSION: what it says it is. Versions before 2.14 write the handles of a group at its end only. */
#include <stdlib.h>
#include <string.h>

#ifndef STUB_NCCL_VERSION
#define STUB_NCCL_VERSION 22803
#endif
#define MOST_IN_GROUP 16
#define POLLS_UNTIL_READY 2

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, IN_PROGRESS = 7 };

typedef struct {
    char internal[128];
} unique_id;

struct config {
    int blocking;
};

struct comm {
    int version; /* first, so that every stub can look at it */
    int rank, size, device, state, polls, blocking;
    struct comm *child, **child_where;
};

struct job {
    struct comm *comm, **where;
};

static __thread struct job jobs[MOST_IN_GROUP];
static __thread int job_count, group_depth;
static _Atomic(int) calls, misuses;
static int next_device;

int stub_calls(void)
{
    return calls;
}

int stub_misuses(void)
{
    return misuses;
}

void stub_set_device(int device)
{
    next_device = device;
}

static int check(const struct comm *comm)
{
    calls++;
    if (comm != NULL && comm->version == STUB_NCCL_VERSION) return SUCCESS;
    misuses++;
    return INVALID_ARGUMENT;
}

int ncclGetVersion(int *version)
{
    *version = STUB_NCCL_VERSION;
    return SUCCESS;
}

static struct comm *make(int rank, int size, int device, const struct config *config)
{
    struct comm *comm = calloc(1, sizeof *comm);
    *comm = (struct comm){.version = STUB_NCCL_VERSION, .rank = rank, .size = size, .device = device, .blocking = 1};
    if (config != NULL) comm->blocking = config->blocking;
    comm->state = comm->blocking ? SUCCESS : IN_PROGRESS;
    return comm;
}

/* In a group nothing is made before its end. */
static int deliver(struct comm *comm, struct comm **where)
{
    if (group_depth == 0 || STUB_NCCL_VERSION > 21400) *where = comm;
    if (group_depth == 0) return comm->state;
    if (job_count == MOST_IN_GROUP) abort();
    jobs[job_count++] = (struct job){comm, where};
    return SUCCESS;
}

int ncclCommInitRank(struct comm **comm, int size, unique_id id, int rank)
{
    calls++;
    (void)id;
    if (rank < 0 || rank >= size) return INVALID_ARGUMENT;
    return deliver(make(rank, size, next_device, NULL), comm);
}

int ncclCommInitRankConfig(struct comm **comm, int size, unique_id id, int rank, struct config *config)
{
    calls++;
    (void)id;
    return deliver(make(rank, size, next_device, config), comm);
}

int ncclCommInitRankScalable(struct comm **comm, int size, int rank, int id_count, unique_id *ids, struct config *config)
{
    calls++;
    if (id_count < 1 || id_count > size || ids == NULL) return INVALID_ARGUMENT;
    return deliver(make(rank, size, next_device, config), comm);
}

int ncclCommInitAll(struct comm **comms, int count, const int *devices)
{
    calls++;
    for (int n = 0; n < count; n++) comms[n] = make(n, count, devices != NULL ? devices[n] : n, NULL);
    return SUCCESS;
}

/* A child of a communicator that does not block is there when the parent has been polled often enough. */
static int deliver_child(struct comm *parent, struct comm *child, struct comm **where)
{
    *where = NULL;
    if (parent->blocking && group_depth == 0) {
        *where = child;
        return SUCCESS;
    }
    if (parent->blocking) {
        if (job_count == MOST_IN_GROUP) abort();
        jobs[job_count++] = (struct job){child, where};
        return SUCCESS;
    }
    parent->child = child;
    parent->child_where = where;
    parent->state = IN_PROGRESS;
    parent->polls = 0;
    return group_depth == 0 ? IN_PROGRESS : SUCCESS;
}

int ncclCommSplit(struct comm *comm, int color, int key, struct comm **child, struct config *config)
{
    if (check(comm) != SUCCESS || comm->state != SUCCESS) return INVALID_ARGUMENT;
    if (color < 0) {
        *child = NULL;
        return SUCCESS;
    }
    struct comm *made = make(key, comm->size, comm->device, config);
    made->state = SUCCESS;
    return deliver_child(comm, made, child);
}

int ncclCommShrink(struct comm *comm, int *excluded, int count, struct comm **child, struct config *config, int flags)
{
    if (check(comm) != SUCCESS || excluded == NULL || flags != 0) return INVALID_ARGUMENT;
    return deliver_child(comm, make(comm->rank, comm->size - count, comm->device, config), child);
}

int ncclCommFinalize(struct comm *comm)
{
    return check(comm);
}

/* A negative device means: this one will not go. */
int ncclCommDestroy(struct comm *comm)
{
    if (comm == NULL) return SUCCESS;
    if (check(comm) != SUCCESS || comm->size == 13) return INVALID_ARGUMENT;
    comm->version = 0;
    free(comm);
    return SUCCESS;
}

int ncclCommAbort(struct comm *comm)
{
    return ncclCommDestroy(comm);
}

int ncclCommGetAsyncError(struct comm *comm, int *state)
{
    if (check(comm) != SUCCESS) return INVALID_ARGUMENT;
    if (comm->state == IN_PROGRESS && ++comm->polls > POLLS_UNTIL_READY) {
        comm->state = SUCCESS;
        if (comm->child != NULL) *comm->child_where = comm->child;
        comm->child = NULL;
    }
    *state = comm->state;
    return SUCCESS;
}

static int ready(const struct comm *comm)
{
    if (check(comm) != SUCCESS) return INVALID_ARGUMENT;
    for (int n = 0; n < job_count; n++)
        if (jobs[n].comm == comm) misuses++; /* not before the group has ended */
    if (comm->state == SUCCESS) return SUCCESS;
    misuses++;
    return INVALID_ARGUMENT;
}

int ncclCommCount(struct comm *comm, int *count)
{
    int rc = ready(comm);
    if (rc == SUCCESS) *count = comm->size;
    return rc;
}

int ncclCommUserRank(struct comm *comm, int *rank)
{
    int rc = ready(comm);
    if (rc == SUCCESS) *rank = comm->rank;
    return rc;
}

int ncclCommCuDevice(struct comm *comm, int *device)
{
    int rc = ready(comm);
    if (rc == SUCCESS) *device = comm->device;
    return rc;
}

int ncclGroupStart(void)
{
    calls++;
    group_depth++;
    return SUCCESS;
}

int ncclGroupEnd(void)
{
    int state = SUCCESS;
    calls++;
    if (--group_depth > 0) return SUCCESS;
    for (int n = 0; n < job_count; n++) {
        *jobs[n].where = jobs[n].comm;
        if (jobs[n].comm->state == IN_PROGRESS) state = IN_PROGRESS;
    }
    job_count = 0;
    return state;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, struct comm *comm, void *stream)
{
    (void)from, (void)to, (void)count, (void)type, (void)op, (void)stream;
    return check(comm);
}

int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, struct comm *comm, void *stream)
{
    (void)from, (void)to, (void)count, (void)type, (void)op, (void)root, (void)stream;
    return check(comm);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, struct comm *comm, void *stream)
{
    (void)from, (void)to, (void)count, (void)type, (void)op, (void)stream;
    return check(comm);
}

int ncclAllGather(const void *from, void *to, size_t count, int type, struct comm *comm, void *stream)
{
    (void)from, (void)to, (void)count, (void)type, (void)stream;
    return check(comm);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *comm, void *stream)
{
    (void)from, (void)to, (void)count, (void)type, (void)root, (void)stream;
    return check(comm);
}

/* Through the global scope, as in NCCL. */
int ncclBcast(void *at, size_t count, int type, int root, struct comm *comm, void *stream)
{
    return ncclBroadcast(at, at, count, type, root, comm, stream);
}

int ncclSend(const void *from, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    (void)from, (void)count, (void)type, (void)stream;
    return check(comm) == SUCCESS && peer >= 0 && peer < comm->size ? SUCCESS : INVALID_ARGUMENT;
}

int ncclRecv(void *to, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    return ncclSend(to, count, type, peer, comm, stream);
}

#if STUB_NCCL_VERSION >= 22800
int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct comm *comm, void *stream)
{
    (void)from, (void)to, (void)count, (void)type, (void)stream;
    return check(comm);
}

int ncclGather(const void *from, void *to, size_t count, int type, int root, struct comm *comm, void *stream)
{
    return ncclBroadcast(from, to, count, type, root, comm, stream);
}

int ncclScatter(const void *from, void *to, size_t count, int type, int root, struct comm *comm, void *stream)
{
    return ncclBroadcast(from, to, count, type, root, comm, stream);
}
#endif
