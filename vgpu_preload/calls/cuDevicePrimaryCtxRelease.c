#include "../allocation.h"
#include "../contexts.h"
#include "../driver.h"
#include "../gate.h"
#include "../intercept.h"

/* The last release ends the context, and with it all memory that was allocated there. */
static void look_whether_it_ended(CUdevice dev)
{
    unsigned int flags = 0;
    int is_active = 1;
    CUresult rc = driver.cuDevicePrimaryCtxGetState(dev, &flags, &is_active);
    if (rc == CUDA_SUCCESS && !is_active) context_ended(context_primary(dev));
}

WRAP(CUresult, cuDevicePrimaryCtxRelease, (CUdevice dev))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuDevicePrimaryCtxRelease, dev);
    if (rc == CUDA_SUCCESS && entered_gate) look_whether_it_ended(dev);
    return rc;
}

WRAP(CUresult, cuDevicePrimaryCtxRelease_v2, (CUdevice dev))
{
    PASS_GATE_APART();
    CUresult rc = NEXT(cuDevicePrimaryCtxRelease_v2, dev);
    if (rc == CUDA_SUCCESS && entered_gate) look_whether_it_ended(dev);
    return rc;
}
