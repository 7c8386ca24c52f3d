/* The gate every call passes. Closed while the process is locked: callers then wait here, in a private futex.
 *
 * Refuses calls before cuInit, in a child forked after cuInit, from stream worker threads (callbacks), and after a device fault.
 */
#include "driver.h"

static pthread_mutex_t gate_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_opened = PTHREAD_COND_INITIALIZER;
static bool is_closed, is_initialised, is_forked;
static int calls_in_flight;
static CUresult fatal;
static _Thread_local bool is_worker_thread;

CUresult gate_enter(void)
{
    if (is_forked || !is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (is_worker_thread) return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&gate_lock);
    while (is_closed) pthread_cond_wait(&gate_opened, &gate_lock);
    CUresult rc = fatal;
    if (rc == CUDA_SUCCESS) calls_in_flight++;
    pthread_mutex_unlock(&gate_lock);
    return rc;
}

void gate_leave(void)
{
    pthread_mutex_lock(&gate_lock);
    calls_in_flight--;
    pthread_mutex_unlock(&gate_lock);
}

void gate_close(void)
{
    pthread_mutex_lock(&gate_lock);
    is_closed = true;
    pthread_mutex_unlock(&gate_lock);
}

void gate_reopen(void)
{
    pthread_mutex_lock(&gate_lock);
    is_closed = false;
    pthread_cond_broadcast(&gate_opened);
    pthread_mutex_unlock(&gate_lock);
}

bool gate_is_quiet(void)
{
    pthread_mutex_lock(&gate_lock);
    bool quiet = calls_in_flight == 0;
    pthread_mutex_unlock(&gate_lock);
    return quiet;
}

void gate_set_fatal(CUresult code)
{
    pthread_mutex_lock(&gate_lock);
    if (fatal == CUDA_SUCCESS) fatal = code;
    pthread_mutex_unlock(&gate_lock);
}

void gate_open_for_business(void) { __atomic_store_n(&is_initialised, true, __ATOMIC_RELEASE); }
bool gate_is_initialised(void) { return __atomic_load_n(&is_initialised, __ATOMIC_ACQUIRE); }
void gate_mark_forked(void) { is_forked = is_initialised; }
bool gate_is_forked(void) { return is_forked; }
void gate_mark_worker_thread(void) { is_worker_thread = true; }
