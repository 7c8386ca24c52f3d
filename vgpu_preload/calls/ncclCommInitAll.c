#include "../nccl_calls.h"

/* All ranks are in this process and the unique id stays within NCCL, so the id is one of our own. */
WRAP(ncclResult_t, ncclCommInitAll, (ncclComm_t *comm, int ndev, const int *devlist))
{
    NCCL_PASSAGE(ncclCommInitAll, NULL);
    ncclResult_t rc = NCCL_NEXT(ncclCommInitAll, (comm, ndev, devlist));
    struct nccl_birth birth = {.facts = {.id = communicator_id_of_its_own(), .size = ndev}};
    for (int n = 0; nccl_is_done(rc) && n < ndev; n++) {
        birth.where = comm + n;
        birth.facts.rank = n;
        nccl_born(&passage, &birth, rc);
    }
    return rc;
}
