#include "../nccl_calls.h"

/* The ranks that stay make this call, with the same list. */
WRAP(ncclResult_t, ncclCommShrink,
     (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm, ncclConfig_t *config,
      int shrinkFlags))
{
    NCCL_PASSAGE(ncclCommShrink, comm);
    ncclResult_t rc =
        NCCL_NEXT(ncclCommShrink, (comm, excludeRanksList, excludeRanksCount, newcomm, config, shrinkFlags));
    struct communicator *parent = passage.of;
    if (!passage.is_outermost || !nccl_is_done(rc)) return rc;
    if (parent == NULL) {
        communicators_note_unlisted();
        return rc;
    }
    uint32_t shrink = atomic_fetch_add(&parent->shrinks, 1) + 1;
    struct nccl_birth birth = {newcomm,
                               {.id = communicator_id_of_shrink(&parent->facts.id, excludeRanksCount, shrink),
                                .parent = parent->facts.id,
                                .has_parent = true}};
    nccl_child_born(&passage, comm, &birth, rc);
    return rc;
}
