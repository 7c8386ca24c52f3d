#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuMemPoolDestroy, (CUmemoryPool pool))
{
    PASS_GATE();
    CUresult rc = NEXT(cuMemPoolDestroy, pool);
    if (rc == CUDA_SUCCESS && entered_gate) held_remove(held_export_key((uintptr_t)pool));
    return rc;
}
