#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuCtxPushCurrent, (CUcontext ctx))
{
    CUresult rc = NEXT(cuCtxPushCurrent, ctx);
    if (rc == CUDA_SUCCESS && gate_is_there) context_note(ctx);
    return rc;
}

WRAP(CUresult, cuCtxPushCurrent_v2, (CUcontext ctx))
{
    CUresult rc = NEXT(cuCtxPushCurrent_v2, ctx);
    if (rc == CUDA_SUCCESS && gate_is_there) context_note(ctx);
    return rc;
}
