/* The calls that wait at the gate and do nothing else: one line each in calls.def. */
#include "gate.h"
#include "intercept.h"

#define CALL(result, name, base, since, threads, parameters, missing)
#define LINKER_CALL(result, name, parameters, missing)
#define OWN(name, base, since, threads, parameters)
#define GATED(name, base, since, threads, parameters, arguments) \
    WRAP(CUresult, name, parameters) \
    { \
        PASS_GATE(); \
        return NEXT_WITH(name, arguments); \
    }
#include "calls.def"
