#include "../gate.h"
#include "../intercept.h"
#include "../pointer_facts.h"

WRAP(CUresult, cuPointerGetAttribute, (void *data, CUpointer_attribute attribute, CUdeviceptr ptr))
{
    struct pointer_facts facts;
    PASS_GATE();
    /* The driver says no in its own width first. */
    if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE && entered_gate) {
        CUresult rc = NEXT(cuPointerGetAttribute, data, attribute, ptr);
        if (rc != CUDA_SUCCESS) return rc;
    }
    if (entered_gate && data != NULL && pointer_facts_of(ptr, &facts)) {
        enum pointer_answer answer = pointer_answer(&facts, attribute, data);
        if (answer == ANSWERED) return CUDA_SUCCESS;
        if (answer == NOT_FOR_THIS) return CUDA_ERROR_INVALID_VALUE;
    }
    return NEXT(cuPointerGetAttribute, data, attribute, ptr);
}
