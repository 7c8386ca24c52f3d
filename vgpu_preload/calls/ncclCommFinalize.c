#include "../nccl_calls.h"

/* No calls follow on it, but it stays until it is destroyed. */
WRAP(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))
{
    NCCL_PASSAGE(ncclCommFinalize, comm);
    ncclResult_t rc = NCCL_NEXT(ncclCommFinalize, (comm));
    if (passage.is_outermost && passage.of != NULL && nccl_is_done(rc))
        atomic_store(&passage.of->is_finalized, true);
    return rc;
}
