#include "../gate.h"
#include "../intercept.h"
#include "../peers.h"

WRAP(CUresult, cuCtxEnablePeerAccess, (CUcontext peerContext, unsigned int Flags))
{
    PASS_GATE();
    CUresult rc = NEXT(cuCtxEnablePeerAccess, peerContext, Flags);
    if (rc == CUDA_SUCCESS && entered_gate) peers_enabled(peerContext);
    return rc;
}
