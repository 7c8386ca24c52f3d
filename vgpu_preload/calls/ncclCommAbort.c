#include "../nccl_calls.h"

WRAP(ncclResult_t, ncclCommAbort, (ncclComm_t comm))
{
    NCCL_PASSAGE(ncclCommAbort, comm);
    struct nccl_end end = nccl_end_begin(&passage, comm);
    ncclResult_t rc = NCCL_NEXT(ncclCommAbort, (comm));
    nccl_end_done(&end, rc);
    return rc;
}
