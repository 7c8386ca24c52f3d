#include "../held.h"
#include "../intercept.h"

/* How the CUDA runtime library, PyTorch and cuda-bindings find every other driver call, cuInit included. The four-
 * argument form is that of CUDA 11.3 to 11.8; it also answers for programs that ask for it by dlsym. */

/* A program asks for a form that the table may not know yet. If the driver's answer is another than for the newest
 * version of the table, it is a new form: a wrapper would pass wrong arguments, so it is left alone and named. */
static bool is_newer_form(const char *symbol, int cuda_version, cuuint64_t flags, const void *function)
{
    void *known = NULL;
    if (cuda_version <= newest_cuda_in_table) return false;
    CUresult rc = NEXT(cuGetProcAddress_v2, symbol, &known, newest_cuda_in_table, flags, NULL);
    return rc != CUDA_SUCCESS || known != function;
}

static void answer(const char *symbol, int cuda_version, cuuint64_t flags, void **function)
{
    if (function == NULL || *function == NULL) return;
    enum call_id id = call_asked_for(symbol, cuda_version, flags);
    if (id == CALL_NONE) return;
    if (is_newer_form(symbol, cuda_version, flags, *function))
        held_note_unknown_call(*function);
    else
        *function = substitute(id, *function, false);
}

WRAP(CUresult, cuGetProcAddress, (const char *symbol, void **function, int cuda_version, cuuint64_t flags))
{
    CUresult rc = NEXT(cuGetProcAddress, symbol, function, cuda_version, flags);
    if (rc == CUDA_SUCCESS) answer(symbol, cuda_version, flags, function);
    return rc;
}

WRAP(CUresult, cuGetProcAddress_v2,
     (const char *symbol, void **function, int cuda_version, cuuint64_t flags, CUdriverProcAddressQueryResult *status))
{
    CUresult rc = NEXT(cuGetProcAddress_v2, symbol, function, cuda_version, flags, status);
    if (rc == CUDA_SUCCESS) answer(symbol, cuda_version, flags, function);
    return rc;
}
