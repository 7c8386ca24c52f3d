#include "../app_memory.h"
#include "../gate.h"
#include "../intercept.h"

/* Sparse arrays name memory by handle inside a list; the list is passed on in parts with the driver's handles. */
#define PART 16
#define NO_MAPPING 2 /* CU_MEM_OPERATION_TYPE_UNMAP */

static unsigned int translated_part(CUarrayMapInfo part[PART], const CUarrayMapInfo *list, unsigned int count)
{
    unsigned int n = 0;
    for (; n < PART && n < count; n++) {
        part[n] = list[n];
        if (part[n].memOperationType == NO_MAPPING) continue;
        app_memory_set_obstacle(part[n].memHandle, "mapped into a sparse array");
        part[n].memHandle = handle_of_token(part[n].memHandle);
    }
    return n;
}

WRAP(CUresult, cuMemMapArrayAsync, (CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream))
{
    CUarrayMapInfo part[PART];
    PASS_GATE();
    if (!entered_gate || mapInfoList == NULL) return NEXT(cuMemMapArrayAsync, mapInfoList, count, hStream);
    for (unsigned int at = 0, size; at < count; at += size) {
        size = translated_part(part, mapInfoList + at, count - at);
        CUresult rc = NEXT(cuMemMapArrayAsync, part, size, hStream);
        if (rc != CUDA_SUCCESS) return rc;
    }
    return CUDA_SUCCESS;
}

WRAP(CUresult, cuMemMapArrayAsync_ptsz, (CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream))
{
    CUarrayMapInfo part[PART];
    PASS_GATE();
    if (!entered_gate || mapInfoList == NULL) return NEXT(cuMemMapArrayAsync_ptsz, mapInfoList, count, hStream);
    for (unsigned int at = 0, size; at < count; at += size) {
        size = translated_part(part, mapInfoList + at, count - at);
        CUresult rc = NEXT(cuMemMapArrayAsync_ptsz, part, size, hStream);
        if (rc != CUDA_SUCCESS) return rc;
    }
    return CUDA_SUCCESS;
}
