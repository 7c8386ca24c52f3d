#include "../nccl_calls.h"

/* Every rank of the parent makes this call, those that get no communicator of it too, so all count the same splits. */
WRAP(ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config))
{
    NCCL_PASSAGE(ncclCommSplit, comm);
    nccl_before_use(&passage, comm);
    ncclResult_t rc = NCCL_NEXT(ncclCommSplit, (comm, color, key, newcomm, config));
    struct communicator *parent = passage.of;
    if (!passage.is_outermost || !nccl_is_done(rc)) return rc;
    uint32_t split = parent == NULL ? 0 : atomic_fetch_add(&parent->splits, 1) + 1;
    if (color < 0) return rc;
    if (parent == NULL) {
        communicators_note_unlisted();
        return rc;
    }
    struct nccl_birth birth = {newcomm,
                               {.id = communicator_id_of_split(&parent->facts.id, color, split),
                                .parent = parent->facts.id,
                                .has_parent = true,
                                .has_split = true,
                                .color = color,
                                .key = key}};
    nccl_child_born(&passage, comm, &birth, rc);
    return rc;
}
