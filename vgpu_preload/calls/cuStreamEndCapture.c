#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuStreamEndCapture, (CUstream hStream, CUgraph *phGraph))
{
    PASS_GATE();
    CUresult rc = NEXT(cuStreamEndCapture, hStream, phGraph);
    if (entered_gate) capture_ended(hStream, rc);
    return rc;
}

WRAP(CUresult, cuStreamEndCapture_ptsz, (CUstream hStream, CUgraph *phGraph))
{
    PASS_GATE();
    CUresult rc = NEXT(cuStreamEndCapture_ptsz, hStream, phGraph);
    if (entered_gate) capture_ended(hStream, rc);
    return rc;
}
