#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

/* Changes nothing on the device, so it does not wait; but here we see contexts that another library made. */
WRAP(CUresult, cuCtxSetCurrent, (CUcontext ctx))
{
    CUresult rc = NEXT(cuCtxSetCurrent, ctx);
    if (rc == CUDA_SUCCESS && gate_is_there) context_note(ctx);
    return rc;
}
