#include "../allocation.h"
#include "../driver.h"
#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

/* The driver wants a current context before it looks at the address. */
static bool close_opened(CUdeviceptr dptr, CUresult *rc)
{
    CUcontext context = NULL;
    return driver.cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != NULL && allocation_close(dptr, rc);
}

WRAP(CUresult, cuIpcCloseMemHandle, (CUdeviceptr dptr))
{
    CUresult rc = CUDA_SUCCESS;
    PASS_GATE();
    if (entered_gate && close_opened(dptr, &rc)) return rc;
    struct held_entry entry = entered_gate ? held_take(dptr) : (struct held_entry){0};
    rc = NEXT(cuIpcCloseMemHandle, dptr);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}
