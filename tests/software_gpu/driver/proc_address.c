/* cuGetProcAddress: a call by its base name and the CUDA version the caller was written for, from the one table calls.h.
 *
 * Knows the calls as addresses only; this file includes no prototypes.
 */
#include <string.h>

#include "software_cuda.h"

#define EXPORT __attribute__((visibility("default")))
typedef void any_call(void);

#define CALL(base, version, symbol) extern any_call symbol;
#define CALL_SELF(base, version, symbol)
#include "calls.h"
#undef CALL
#undef CALL_SELF

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags);
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, int *status);
EXPORT CUresult cuGetExportTable(const void **table, const void *id);

static const struct { const char *base; int version; void *address; } calls[] = {
#define CALL(base, version, symbol) {#base, version, (void *)symbol},
#define CALL_SELF CALL
#include "calls.h"
#undef CALL
#undef CALL_SELF
};

/* The newest form that is not newer than asked for. With a place for the status a missing call is no error (measured, 580.159.04). */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, int *status)
{
    int best = -1, result = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (!name || !out || flags > 2) return CUDA_ERROR_INVALID_VALUE; /* per-thread default streams share the plain entries */
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        if (strcmp(calls[n].base, name) != 0) continue;
        if (best < 0) result = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        if (calls[n].version > version || (best >= 0 && calls[n].version < calls[best].version)) continue;
        best = (int)n;
        result = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    *out = best < 0 ? NULL : calls[best].address;
    if (status) *status = result;
    return best < 0 && !status ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

EXPORT CUresult cuGetExportTable(const void **table, const void *id)
{
    (void)id; /* private tables of the real driver */
    if (table) *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
