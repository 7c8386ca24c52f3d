#include "../contexts.h"
#include "../gate.h"
#include "../intercept.h"

WRAP(CUresult, cuStreamBeginCaptureToGraph,
     (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
      size_t numDependencies, CUstreamCaptureMode mode))
{
    PASS_GATE_APART();
    CUresult rc =
        NEXT(cuStreamBeginCaptureToGraph, hStream, hGraph, dependencies, dependencyData, numDependencies, mode);
    if (rc == CUDA_SUCCESS && entered_gate) capture_begun(hStream);
    return rc;
}

WRAP(CUresult, cuStreamBeginCaptureToGraph_ptsz,
     (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
      size_t numDependencies, CUstreamCaptureMode mode))
{
    PASS_GATE_APART();
    CUresult rc =
        NEXT(cuStreamBeginCaptureToGraph_ptsz, hStream, hGraph, dependencies, dependencyData, numDependencies, mode);
    if (rc == CUDA_SUCCESS && entered_gate) capture_begun(hStream);
    return rc;
}
