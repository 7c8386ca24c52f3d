#include "../intercept.h"

/* The four-argument form of CUDA 11.3 to 11.8; also answers for programs that ask for it by dlsym. */
WRAP(CUresult, cuGetProcAddress, (const char *symbol, void **function, int cuda_version, cuuint64_t flags))
{
    CUresult rc = NEXT(cuGetProcAddress, symbol, function, cuda_version, flags);
    if (rc == CUDA_SUCCESS) substitute_proc_address(symbol, cuda_version, function);
    return rc;
}
