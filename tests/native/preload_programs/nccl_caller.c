/* An extension that was linked against libnccl.so.2, as a framework's is: its calls reach the preload by the linker. */
#include <stddef.h>
#include <string.h>

typedef struct {
    char internal[128];
} unique_id;

int ncclCommInitRank(void **comm, int size, unique_id id, int rank);
int ncclCommInitRankConfig(void **comm, int size, unique_id id, int rank, void *config);
int ncclCommSplit(void *comm, int color, int key, void **child, void *config);
int ncclCommDestroy(void *comm);
int ncclCommGetAsyncError(void *comm, int *state);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream);
int ncclBcast(void *at, size_t count, int type, int root, void *comm, void *stream);

static unique_id filled(int byte)
{
    unique_id id;
    memset(id.internal, byte, sizeof id.internal);
    return id;
}

void *caller_init(int size, int rank, int byte)
{
    void *comm = NULL;
    return ncclCommInitRank(&comm, size, filled(byte), rank) == 0 ? comm : NULL;
}

/* Handles that nobody has set before, as on a stack. */
int caller_init_group(void **comms, int size, int byte)
{
    memset(comms, 0x5a, (size_t)size * sizeof *comms);
    if (ncclGroupStart() != 0 || ncclGroupStart() != 0) return 1;
    for (int rank = 0; rank < size; rank++)
        if (ncclCommInitRank(&comms[rank], size, filled(byte), rank) != 0) return 2;
    return ncclGroupEnd() == 0 ? ncclGroupEnd() : 3;
}

int caller_split_group(void **parents, void **children, int size, int color)
{
    if (ncclGroupStart() != 0) return 1;
    for (int rank = 0; rank < size; rank++)
        if (ncclCommSplit(parents[rank], color, rank, &children[rank], NULL) != 0) return 2;
    return ncclGroupEnd();
}

int caller_init_without_blocking(void **comm, int byte)
{
    int blocking = 0;
    return ncclCommInitRankConfig(comm, 4, filled(byte), 3, &blocking);
}

int caller_all_reduce(void *comm)
{
    return ncclAllReduce(NULL, NULL, 0, 0, 0, comm, NULL);
}

int caller_bcast(void *comm)
{
    return ncclBcast(NULL, 0, 0, 0, comm, NULL);
}

int caller_destroy(void *comm)
{
    return ncclCommDestroy(comm);
}

int caller_state(void *comm)
{
    int state = -1;
    return ncclCommGetAsyncError(comm, &state) == 0 ? state : -2;
}
