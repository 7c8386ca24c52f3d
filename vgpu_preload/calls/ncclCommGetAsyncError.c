#include "../nccl_calls.h"

/* How an application waits for a communicator that does not block; from then on NCCL can be asked what it is. */
WRAP(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *asyncError))
{
    NCCL_PASSAGE(ncclCommGetAsyncError, comm);
    ncclResult_t rc = NCCL_NEXT(ncclCommGetAsyncError, (comm, asyncError));
    if (passage.is_outermost && rc == ncclSuccess) nccl_state_is(comm, *asyncError);
    return rc;
}
