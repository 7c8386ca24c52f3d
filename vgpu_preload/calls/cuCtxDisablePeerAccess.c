#include "../gate.h"
#include "../intercept.h"
#include "../peers.h"

WRAP(CUresult, cuCtxDisablePeerAccess, (CUcontext peerContext))
{
    PASS_GATE();
    CUresult rc = NEXT(cuCtxDisablePeerAccess, peerContext);
    if (rc == CUDA_SUCCESS && entered_gate) peers_disabled(peerContext);
    return rc;
}
