#include "../gate.h"
#include "../held.h"
#include "../intercept.h"

WRAP(CUresult, cuImportExternalMemory,
     (CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc))
{
    PASS_GATE();
    CUresult rc = NEXT(cuImportExternalMemory, extMem_out, memHandleDesc);
    if (rc == CUDA_SUCCESS && entered_gate) held_add(BLOCKER_EXTERNAL_MEMORY, (uintptr_t)*extMem_out, 0, NULL);
    return rc;
}
