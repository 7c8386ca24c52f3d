#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuCtxCreate, (CUcontext *pctx, unsigned int flags, CUdevice dev))
{
    PASS_GATE();
    CUresult rc = NEXT(cuCtxCreate, pctx, flags, dev);
    if (rc == CUDA_SUCCESS && entered_gate) context_note(*pctx);
    return rc;
}

WRAP(CUresult, cuCtxCreate_v2, (CUcontext *pctx, unsigned int flags, CUdevice dev))
{
    PASS_GATE();
    CUresult rc = NEXT(cuCtxCreate_v2, pctx, flags, dev);
    if (rc == CUDA_SUCCESS && entered_gate) context_note(*pctx);
    return rc;
}

WRAP(CUresult, cuCtxCreate_v3,
     (CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev))
{
    PASS_GATE();
    CUresult rc = NEXT(cuCtxCreate_v3, pctx, paramsArray, numParams, flags, dev);
    if (rc == CUDA_SUCCESS && entered_gate) context_note(*pctx);
    return rc;
}

WRAP(CUresult, cuCtxCreate_v4, (CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev))
{
    PASS_GATE();
    CUresult rc = NEXT(cuCtxCreate_v4, pctx, ctxCreateParams, flags, dev);
    if (rc == CUDA_SUCCESS && entered_gate) context_note(*pctx);
    return rc;
}
