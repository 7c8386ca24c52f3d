#include "../nccl_calls.h"

static struct nccl_birth birth_of(ncclComm_t *where, const ncclUniqueId *ids, int count, int rank, int size)
{
    size_t bytes = (size_t)count * sizeof *ids;
    return (struct nccl_birth){where, {.id = communicator_id_of(ids, bytes), .rank = rank, .size = size}};
}

WRAP(ncclResult_t, ncclCommInitRank, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank))
{
    NCCL_PASSAGE(ncclCommInitRank, NULL);
    ncclResult_t rc = NCCL_NEXT(ncclCommInitRank, (comm, nranks, commId, rank));
    struct nccl_birth birth = birth_of(comm, &commId, 1, rank, nranks);
    nccl_born(&passage, &birth, rc);
    return rc;
}

WRAP(ncclResult_t, ncclCommInitRankConfig,
     (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config))
{
    NCCL_PASSAGE(ncclCommInitRankConfig, NULL);
    ncclResult_t rc = NCCL_NEXT(ncclCommInitRankConfig, (comm, nranks, commId, rank, config));
    struct nccl_birth birth = birth_of(comm, &commId, 1, rank, nranks);
    nccl_born(&passage, &birth, rc);
    return rc;
}

/* The ids are read only when NCCL has found their number right. */
WRAP(ncclResult_t, ncclCommInitRankScalable,
     (ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config))
{
    NCCL_PASSAGE(ncclCommInitRankScalable, NULL);
    ncclResult_t rc = NCCL_NEXT(ncclCommInitRankScalable, (newcomm, nranks, myrank, nId, commIds, config));
    if (nccl_is_done(rc) && nId > 0 && nId <= nranks) {
        struct nccl_birth birth = birth_of(newcomm, commIds, nId, myrank, nranks);
        nccl_born(&passage, &birth, rc);
    }
    return rc;
}
