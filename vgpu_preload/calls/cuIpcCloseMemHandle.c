#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuIpcCloseMemHandle, (CUdeviceptr dptr))
{
    PASS_GATE();
    struct held_entry entry = entered_gate ? held_take(dptr) : (struct held_entry){0};
    CUresult rc = NEXT(cuIpcCloseMemHandle, dptr);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}
