#include "../intercept.h"
#include "../nvshmem_facts.h"

/* An element that is not in the new team gets an invalid one. */
WRAP(int, nvshmem_team_split_strided,
     (nvshmem_team_t parent_team, int PE_start, int PE_stride, int PE_size, const nvshmem_team_config_t *config,
      long config_mask, nvshmem_team_t *new_team))
{
    NVSHMEM_PASSAGE();
    int rc = NEXT(nvshmem_team_split_strided, parent_team, PE_start, PE_stride, PE_size, config, config_mask, new_team);
    if (rc == 0 && is_outermost)
        nvshmem_team_made(function_behind(CALL_nvshmem_team_split_strided), *new_team, parent_team);
    return rc;
}
