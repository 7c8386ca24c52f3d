#include "../held.h"
#include "../intercept.h"

/* No gate: an event holds no memory that is moved, and programs destroy many. */
static void forget_shared_event(CUevent event)
{
    if (held_has_had(BLOCKER_IPC_EVENT)) held_remove((uintptr_t)event);
}

WRAP(CUresult, cuEventDestroy, (CUevent hEvent))
{
    forget_shared_event(hEvent);
    return NEXT(cuEventDestroy, hEvent);
}

WRAP(CUresult, cuEventDestroy_v2, (CUevent hEvent))
{
    forget_shared_event(hEvent);
    return NEXT(cuEventDestroy_v2, hEvent);
}
