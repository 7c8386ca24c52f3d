#define _GNU_SOURCE
#include "synchroniser.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "contexts.h"
#include "driver.h"
#include "threads.h"

#define POLL_US 50

#define CUDA_ERROR_CONTEXT_IS_DESTROYED 709

enum synchroniser { NOT_RUNNING, PARKED, SYNCHRONISE, GO_AWAY };

static _Atomic(uint32_t) state;
static CUresult result; /* written before PARKED, read after */

static CUresult synchronise(CUcontext context)
{
    CUresult rc = driver.cuCtxSetCurrent(context);
    if (rc == CUDA_ERROR_INVALID_CONTEXT || rc == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
        context_forget(context); /* ended without our notice, and its work with it */
        return CUDA_SUCCESS;
    }
    return rc == CUDA_SUCCESS ? driver.cuCtxSynchronize() : rc;
}

static CUresult synchronise_all(void)
{
    static CUcontext contexts[MOST_CONTEXTS]; /* there is one such thread at a time */
    unsigned int count = contexts_copy(contexts);
    CUresult rc = CUDA_SUCCESS;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    for (unsigned int n = 0; n < count && rc == CUDA_SUCCESS; n++) rc = synchronise(contexts[n]);
    driver.cuCtxSetCurrent(NULL);
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    return rc;
}

static void futex(int operation, uint32_t value)
{
    syscall(SYS_futex, &state, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void *synchroniser_main(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "vgpu-sync");
    for (uint32_t now; (now = atomic_load(&state)) != GO_AWAY;) {
        if (now == PARKED) {
            futex(FUTEX_WAIT, PARKED);
            continue;
        }
        result = synchronise_all();
        atomic_compare_exchange_strong(&state, &now, PARKED); /* unless it was dismissed meanwhile */
    }
    atomic_store(&state, NOT_RUNNING);
    return NULL;
}

bool synchroniser_wait_for_end(int64_t end_ms)
{
    while (atomic_load(&state) != NOT_RUNNING) {
        if (clock_now_ms() >= end_ms) return false;
        clock_sleep_us(POLL_US);
    }
    return true;
}

struct fault synchroniser_start(int64_t end_ms)
{
    if (!synchroniser_wait_for_end(end_ms))
        return (struct fault){.what = "the synchronisation of an earlier attempt has not ended"};
    atomic_store(&state, PARKED);
    if (thread_start(synchroniser_main, NULL)) return (struct fault){0};
    atomic_store(&state, NOT_RUNNING);
    return (struct fault){.what = "no thread could be started"};
}

static void tell(enum synchroniser order)
{
    atomic_store(&state, order);
    futex(FUTEX_WAKE, INT_MAX);
}

void synchroniser_ask(void)
{
    tell(SYNCHRONISE);
}

bool synchroniser_is_done(CUresult *rc)
{
    if (atomic_load(&state) != PARKED) return false;
    *rc = result;
    return true;
}

bool synchroniser_wait(int64_t end_ms, CUresult *rc)
{
    while (!synchroniser_is_done(rc)) {
        if (clock_now_ms() >= end_ms) return false;
        clock_sleep_us(POLL_US);
    }
    return true;
}

void synchroniser_dismiss(void)
{
    uint32_t now = atomic_load(&state);
    if (now == PARKED || now == SYNCHRONISE) tell(GO_AWAY);
}

void synchroniser_after_fork_in_child(void)
{
    atomic_store(&state, NOT_RUNNING);
}
