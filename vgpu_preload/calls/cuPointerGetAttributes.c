#include <string.h>

#include "../gate.h"
#include "../intercept.h"
#include "../pointer_facts.h"

/* The driver answers first, so that faults in the request are found by it; then our memory's answers replace its own.
 */
WRAP(CUresult, cuPointerGetAttributes,
     (unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr))
{
    struct pointer_facts facts;
    PASS_GATE();
    CUresult rc = NEXT(cuPointerGetAttributes, numAttributes, attributes, data, ptr);
    if (rc != CUDA_SUCCESS || !entered_gate || !pointer_facts_of(ptr, &facts)) return rc;
    for (unsigned int n = 0; n < numAttributes; n++)
        if (pointer_answer(&facts, attributes[n], data[n]) == NOT_FOR_THIS) memset(data[n], 0, sizeof(void *));
    return rc;
}
