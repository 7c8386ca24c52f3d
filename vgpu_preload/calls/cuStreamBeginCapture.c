#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuStreamBeginCapture, (CUstream hStream))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuStreamBeginCapture, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) capture_begun(hStream);
    return rc;
}

WRAP(CUresult, cuStreamBeginCapture_ptsz, (CUstream hStream))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuStreamBeginCapture_ptsz, hStream);
    if (rc == CUDA_SUCCESS && entered_gate) capture_begun(hStream);
    return rc;
}

WRAP(CUresult, cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuStreamBeginCapture_v2, hStream, mode);
    if (rc == CUDA_SUCCESS && entered_gate) capture_begun(hStream);
    return rc;
}

WRAP(CUresult, cuStreamBeginCapture_v2_ptsz, (CUstream hStream, CUstreamCaptureMode mode))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuStreamBeginCapture_v2_ptsz, hStream, mode);
    if (rc == CUDA_SUCCESS && entered_gate) capture_begun(hStream);
    return rc;
}
