#include "../intercept.h"

/* How the CUDA runtime library, PyTorch and cuda-bindings find every other driver call, cuInit included. */
WRAP(CUresult, cuGetProcAddress_v2,
     (const char *symbol, void **function, int cuda_version, cuuint64_t flags, int *status))
{
    CUresult rc = NEXT(cuGetProcAddress_v2, symbol, function, cuda_version, flags, status);
    if (rc == CUDA_SUCCESS) substitute_proc_address(symbol, cuda_version, function);
    return rc;
}
