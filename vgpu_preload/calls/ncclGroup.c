#include "../nccl_calls.h"

/* What is made within a group of calls is there when the outermost group of the thread has ended. */
WRAP(ncclResult_t, ncclGroupStart, (void))
{
    NCCL_PASSAGE_BY(nccl_enter_group(CALL_ncclGroupStart, __builtin_return_address(0)));
    ncclResult_t rc = NCCL_NEXT(ncclGroupStart, ());
    if (passage.is_outermost && rc == ncclSuccess) nccl_group_started();
    return rc;
}

WRAP(ncclResult_t, ncclGroupEnd, (void))
{
    NCCL_PASSAGE_BY(nccl_enter_group(CALL_ncclGroupEnd, __builtin_return_address(0)));
    ncclResult_t rc = NCCL_NEXT(ncclGroupEnd, ());
    if (passage.is_outermost) nccl_group_ended(rc);
    return rc;
}
