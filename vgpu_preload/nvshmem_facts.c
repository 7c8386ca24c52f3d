#include "nvshmem_facts.h"

#include <pthread.h>
#include <string.h>

#include "driver.h"
#include "loaded_objects.h"

_Thread_local unsigned int nvshmem_depth;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nvshmem_facts facts, given;

typedef int asks_for_number(void);
typedef int asks_for_number_in(nvshmem_team_t team);
typedef void asks_for_version(int *major, int *minor, int *patch);

static int ask(const void *beside, const char *name)
{
    asks_for_number *function = (asks_for_number *)loaded_beside(beside, name);
    return function != NULL ? function() : -1;
}

static int ask_in(const void *beside, const char *name, nvshmem_team_t team)
{
    asks_for_number_in *function = (asks_for_number_in *)loaded_beside(beside, name);
    return function != NULL ? function(team) : -1;
}

/* NVSHMEM works in the context that is current when it is initialised. */
static int current_device(void)
{
    CUdevice device;
    return driver.cuCtxGetDevice != NULL && driver.cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : -1;
}

void nvshmem_initialised(const void *function)
{
    int pe = ask(function, "nvshmem_my_pe"), size = ask(function, "nvshmem_n_pes"), device = current_device();
    int major = 0, minor = 0, patch = 0;
    asks_for_version *version = (asks_for_version *)loaded_beside(function, "nvshmemx_vendor_get_version_info");
    if (version != NULL) version(&major, &minor, &patch);
    if (pe < 0 || size <= pe) return;
    pthread_mutex_lock(&lock);
    facts.pe = pe;
    facts.size = size;
    if (!facts.is_there || device >= 0) facts.device = device;
    facts.is_there = true;
    facts.major = major;
    facts.minor = minor;
    facts.patch = patch;
    pthread_mutex_unlock(&lock);
}

/* With the lock held. */
static void forget(void)
{
    facts.is_there = false;
    facts.device = -1;
    facts.team_count = 0;
    facts.unlisted = 0;
}

/* It may be initialised several times and ends with the last. */
void nvshmem_finalised(const void *function)
{
    if (ask(function, "nvshmemx_init_status") >= NVSHMEM_STATUS_IS_INITIALIZED) return;
    pthread_mutex_lock(&lock);
    forget();
    pthread_mutex_unlock(&lock);
}

/* With the lock held. */
static struct nvshmem_team *place_of(nvshmem_team_t team)
{
    for (unsigned int n = 0; n < facts.team_count; n++)
        if (facts.teams[n].team == team) return &facts.teams[n];
    return NULL;
}

void nvshmem_team_made(const void *function, nvshmem_team_t team, nvshmem_team_t parent)
{
    if (team == NVSHMEM_TEAM_INVALID) return;
    int pe = ask_in(function, "nvshmem_team_my_pe", team), size = ask_in(function, "nvshmem_team_n_pes", team);
    int device = current_device();
    if (pe < 0 || size <= pe) return;
    pthread_mutex_lock(&lock);
    struct nvshmem_team *place = place_of(team);
    if (place == NULL && facts.team_count < MOST_TEAMS) place = &facts.teams[facts.team_count++];
    if (place != NULL)
        *place = (struct nvshmem_team){.team = team, .parent = parent, .pe = pe, .size = size};
    else
        facts.unlisted++;
    if (facts.device < 0) facts.device = device;
    pthread_mutex_unlock(&lock);
}

void nvshmem_team_gone(nvshmem_team_t team)
{
    pthread_mutex_lock(&lock);
    struct nvshmem_team *place = place_of(team);
    if (place != NULL) *place = facts.teams[--facts.team_count];
    pthread_mutex_unlock(&lock);
}

const struct nvshmem_facts *nvshmem_facts(void)
{
    pthread_mutex_lock(&lock);
    given = facts;
    pthread_mutex_unlock(&lock);
    return &given;
}

void nvshmem_after_fork_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    if (facts.is_there) forget();
}
