#include "../nccl_calls.h"

WRAP(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))
{
    NCCL_PASSAGE(ncclCommDestroy, comm);
    struct nccl_end end = nccl_end_begin(&passage, comm);
    ncclResult_t rc = NCCL_NEXT(ncclCommDestroy, (comm));
    nccl_end_done(&end, rc);
    return rc;
}
