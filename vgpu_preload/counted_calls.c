/* The calls of NCCL that are counted and do nothing else: one line each in calls.def. A call in a graph that is being
 * captured counts then, once, and not when the graph is launched. */
#include "nccl_calls.h"

#define CALL(result, name, base, since, threads, parameters, missing)
#define LINKER_CALL(result, name, parameters, missing)
#define COUNTED(name, counter, parameters, arguments) \
    WRAP(ncclResult_t, name, parameters) \
    { \
        NCCL_PASSAGE(name, comm); \
        nccl_before_use(&passage, comm); \
        ncclResult_t rc = NCCL_NEXT(name, arguments); \
        if (passage.of != NULL && passage.is_outermost && nccl_is_done(rc)) \
            atomic_fetch_add_explicit(&passage.of->counter, 1, memory_order_relaxed); \
        return rc; \
    }
#include "calls.def"
