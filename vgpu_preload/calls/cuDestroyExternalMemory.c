#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuDestroyExternalMemory, (CUexternalMemory extMem))
{
    PASS_GATE();
    struct held_entry entry = entered_gate ? held_take((uintptr_t)extMem) : (struct held_entry){0};
    CUresult rc = NEXT(cuDestroyExternalMemory, extMem);
    if (rc != CUDA_SUCCESS) held_put_back(&entry);
    return rc;
}
