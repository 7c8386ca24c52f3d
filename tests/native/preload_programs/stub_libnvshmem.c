/* A stand-in for libnvshmem_host.so.3: one element of as many as STUB_PES says, teams by number, nothing is moved. */
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int major;
    int minor;
    int patch;
} version_t;

typedef void device_lib_init(void **state, void **transport_state);

#define FIRST_TEAM 6

static int init_count, team_count = FIRST_TEAM, gone;

static int environment(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? atoi(text) : otherwise;
}

int nvshmem_my_pe(void)
{
    return environment("STUB_PE", 0);
}

int nvshmem_n_pes(void)
{
    return environment("STUB_PES", 1);
}

int nvshmem_team_my_pe(int32_t team)
{
    return team - FIRST_TEAM;
}

int nvshmem_team_n_pes(int32_t team)
{
    return team;
}

void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch)
{
    *major = 3, *minor = 4, *patch = 5;
}

int nvshmemx_init_status(void)
{
    return init_count > 0 ? 2 : 0;
}

int nvshmemid_hostlib_init_attr(int requested, int *provided, unsigned int flags, void *attributes, version_t version,
                                device_lib_init *callback)
{
    (void)attributes, (void)callback;
    if (version.major != 3 || version.minor != 4 || version.patch != 5 || flags != 8) return 1;
    init_count++;
    *provided = requested;
    return 0;
}

int nvshmemx_hostlib_init_attr(unsigned int flags, void *attributes)
{
    int provided;
    return nvshmemid_hostlib_init_attr(1, &provided, flags, attributes, (version_t){3, 4, 5}, NULL);
}

void nvshmemid_hostlib_finalize(void *state, void *transport_state)
{
    (void)state, (void)transport_state;
    init_count--;
}

void nvshmemx_hostlib_finalize(void)
{
    nvshmemid_hostlib_finalize(NULL, NULL);
}

/* An element outside of the new team gets an invalid one. */
int nvshmem_team_split_strided(int32_t parent, int start, int stride, int size, const void *config, long mask,
                               int32_t *team)
{
    (void)parent, (void)stride, (void)size, (void)config, (void)mask;
    *team = start > nvshmem_my_pe() ? -1 : team_count++;
    return 0;
}

int nvshmem_team_split_2d(int32_t parent, int range, const void *x_config, long x_mask, int32_t *x_team,
                          const void *y_config, long y_mask, int32_t *y_team)
{
    if (range < 1) return 1;
    nvshmem_team_split_strided(parent, 0, 1, range, x_config, x_mask, x_team);
    return nvshmem_team_split_strided(parent, 0, range, 1, y_config, y_mask, y_team);
}

void nvshmem_team_destroy(int32_t team)
{
    (void)team;
    gone++;
}

int stub_teams_gone(void)
{
    return gone;
}
