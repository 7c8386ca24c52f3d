#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuArrayDestroy, (CUarray hArray))
{
    PASS_GATE();
    struct held_entry entry = entered_gate ? held_take((uintptr_t)hArray) : (struct held_entry){0};
    CUresult rc = NEXT(cuArrayDestroy, hArray);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}
