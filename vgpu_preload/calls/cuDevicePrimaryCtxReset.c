#include "../allocation.h"
#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

/* The handle may stay valid for who has retained it; the memory is gone in any case. */
static void note_reset(CUdevice dev)
{
    CUcontext context = context_primary(dev);
    context_ended(context);
    context_note_primary(dev, context);
}

WRAP(CUresult, cuDevicePrimaryCtxReset, (CUdevice dev))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuDevicePrimaryCtxReset, dev);
    if (rc == CUDA_SUCCESS && entered_gate) note_reset(dev);
    return rc;
}

WRAP(CUresult, cuDevicePrimaryCtxReset_v2, (CUdevice dev))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuDevicePrimaryCtxReset_v2, dev);
    if (rc == CUDA_SUCCESS && entered_gate) note_reset(dev);
    return rc;
}
