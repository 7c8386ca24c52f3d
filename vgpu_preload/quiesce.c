#define _GNU_SOURCE
#include "quiesce.h"

#include <stdatomic.h>
#include <sys/prctl.h>

#include "clock.h"
#include "contexts.h"
#include "driver.h"
#include "gate.h"
#include "threads.h"

#define POLL_US 50
#define CAPTURE_POLL_US 500

#define CUDA_ERROR_CONTEXT_IS_DESTROYED 709

enum synchroniser { NOT_RUNNING, PARKED, SYNCHRONISE, GO_AWAY };

static _Atomic(int) synchroniser;
static CUresult synchronised; /* written before NOT_RUNNING, read after */

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
    return rc;
}

static void *synchroniser_main(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "vgpu-sync");
    while (atomic_load(&synchroniser) == PARKED) clock_sleep_us(POLL_US);
    if (atomic_load(&synchroniser) == SYNCHRONISE) synchronised = synchronise_all();
    atomic_store(&synchroniser, NOT_RUNNING);
    return NULL;
}

static bool wait_for_synchroniser(int64_t end_ms)
{
    while (atomic_load(&synchroniser) != NOT_RUNNING) {
        if (clock_now_ms() >= end_ms) return false;
        clock_sleep_us(POLL_US);
    }
    return true;
}

static bool wait_for_captures(int64_t end_ms)
{
    for (captures_check(); capture_is_active(); captures_check()) {
        if (clock_now_ms() >= end_ms) return false;
        clock_sleep_us(CAPTURE_POLL_US);
    }
    return true;
}

/* A capture ends with a call of the application, so it must not be caught behind the gate. */
static struct fault close_gate(int64_t end_ms)
{
    for (;;) {
        if (!wait_for_captures(end_ms)) return (struct fault){.what = "a stream capture is in progress"};
        if (!gate_close(end_ms)) return (struct fault){.what = "a call did not return before the deadline"};
        if (!capture_is_active()) return (struct fault){0};
        gate_open();
    }
}

static struct fault synchronise_until(int64_t end_ms)
{
    atomic_store(&synchroniser, SYNCHRONISE);
    if (!wait_for_synchroniser(end_ms))
        return (struct fault){.what = "work on the device did not end before the deadline"};
    if (synchronised != CUDA_SUCCESS) return (struct fault){.what = "cuCtxSynchronize failed", .code = synchronised};
    return (struct fault){0};
}

struct fault quiesce(int64_t deadline_ms, struct rest_times *times)
{
    int64_t begin = clock_now_ms(), end = begin + deadline_ms;
    if (!wait_for_synchroniser(end))
        return (struct fault){.what = "the synchronisation of an earlier attempt has not ended"};
    atomic_store(&synchroniser, PARKED);
    if (!thread_start(synchroniser_main, NULL)) {
        atomic_store(&synchroniser, NOT_RUNNING);
        return (struct fault){.what = "no thread could be started"};
    }
    struct fault fault = close_gate(end);
    if (fault.what != NULL) {
        atomic_store(&synchroniser, GO_AWAY);
        return fault;
    }
    int64_t closed = clock_now_ms();
    fault = synchronise_until(end);
    if (fault.what != NULL) gate_open();
    *times = (struct rest_times){.waited_ms = closed - begin, .sync_ms = clock_now_ms() - closed};
    return fault;
}

void quiesce_after_fork_in_child(void)
{
    atomic_store(&synchroniser, NOT_RUNNING);
}
