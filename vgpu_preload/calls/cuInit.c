#include "../helper.h"
#include "../intercept.h"

/* The first success makes this a GPU process: from here on the node agent is told about it. */
WRAP(CUresult, cuInit, (unsigned int flags))
{
    CUresult rc = NEXT(cuInit, flags);
    if (rc == CUDA_SUCCESS) helper_start();
    return rc;
}
