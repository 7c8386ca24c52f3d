#include "../intercept.h"
#include "../nvshmem_facts.h"

/* Forgotten before, because another thread may get the same handle for a new team at once. */
WRAP(void, nvshmem_team_destroy, (nvshmem_team_t team))
{
    NVSHMEM_PASSAGE();
    if (is_outermost) nvshmem_team_gone(team);
    NEXT(nvshmem_team_destroy, team);
}
