#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuStreamDestroy, (CUstream hStream))
{
    PASS_GATE();
    CUresult rc = NEXT(cuStreamDestroy, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) capture_stream_gone(hStream);
    return rc;
}

WRAP(CUresult, cuStreamDestroy_v2, (CUstream hStream))
{
    PASS_GATE();
    CUresult rc = NEXT(cuStreamDestroy_v2, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) capture_stream_gone(hStream);
    return rc;
}
