#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuDevicePrimaryCtxRetain, (CUcontext *pctx, CUdevice dev))
{
    PASS_GATE();
    CUresult rc = NEXT(cuDevicePrimaryCtxRetain, pctx, dev);
    if (rc == CUDA_SUCCESS && entered_gate) context_note_primary(dev, *pctx);
    return rc;
}
