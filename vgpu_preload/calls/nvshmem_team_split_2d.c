#include "../intercept.h"
#include "../nvshmem_facts.h"

WRAP(int, nvshmem_team_split_2d,
     (nvshmem_team_t parent_team, int xrange, const nvshmem_team_config_t *xaxis_config, long xaxis_mask,
      nvshmem_team_t *xaxis_team, const nvshmem_team_config_t *yaxis_config, long yaxis_mask,
      nvshmem_team_t *yaxis_team))
{
    NVSHMEM_PASSAGE();
    int rc = NEXT(nvshmem_team_split_2d, parent_team, xrange, xaxis_config, xaxis_mask, xaxis_team, yaxis_config,
                  yaxis_mask, yaxis_team);
    if (rc != 0 || !is_outermost) return rc;
    nvshmem_team_made(function_behind(CALL_nvshmem_team_split_2d), *xaxis_team, parent_team);
    nvshmem_team_made(function_behind(CALL_nvshmem_team_split_2d), *yaxis_team, parent_team);
    return rc;
}
