#include "../allocation.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuCtxDestroy, (CUcontext ctx))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuCtxDestroy, ctx);
    if (rc == CUDA_SUCCESS && entered_gate) context_ended(ctx);
    return rc;
}

WRAP(CUresult, cuCtxDestroy_v2, (CUcontext ctx))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuCtxDestroy_v2, ctx);
    if (rc == CUDA_SUCCESS && entered_gate) context_ended(ctx);
    return rc;
}
