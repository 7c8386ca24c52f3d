/* Events: a place in a stream, and the time it was reached; of interprocess events, how often it was reached by anybody. */
#include <time.h>

#include "driver.h"

#define EVENT_MAGIC 0x746e657645575357ull

static CUevent all_events;

static bool is_event(CUevent event) { return event && event->magic == EVENT_MAGIC; }
static bool is_reached(CUevent event)
{
    struct shared_event *shared = event->shared;
    if (shared) return __atomic_load_n(&shared->reached, __ATOMIC_ACQUIRE) >= __atomic_load_n(&shared->recorded, __ATOMIC_ACQUIRE);
    return !event->stream || event->stream->completed >= event->number;
}

bool event_is_valid(CUevent event) { return is_event(event); }

CUresult event_new(CUevent *out, unsigned flags, struct shared_event *shared, int shared_file)
{
    pthread_mutex_lock(&work_lock);
    CUevent event = all_events;
    while (event && event->magic) event = event->next;
    if (!event && (event = calloc(1, sizeof *event))) {
        event->next = all_events;
        all_events = event;
    }
    if (event) {
        event->magic = EVENT_MAGIC;
        event->flags = flags;
        event->stream = NULL;
        event->capture = NULL;
        event->time_ns = 0;
        event->shared = shared;
        event->shared_file = shared_file;
    }
    pthread_mutex_unlock(&work_lock);
    NEED(event, CUDA_ERROR_OUT_OF_MEMORY);
    *out = event;
    return CUDA_SUCCESS;
}

API(cuEventCreate, (CUevent *out, unsigned flags), (out, flags))
{
    int file = -1;
    bool is_shared = flags & CU_EVENT_INTERPROCESS;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(context_current(), CUDA_ERROR_INVALID_CONTEXT);
    NEED(!is_shared || (flags & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_VALUE);
    struct shared_event *shared = is_shared ? shared_event_make(&file) : NULL;
    NEED(shared || !is_shared, CUDA_ERROR_OPERATING_SYSTEM);
    return event_new(out, flags, shared, file);
}

API(cuEventDestroy_v2, (CUevent event), (event))
{
    NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
    pthread_mutex_lock(&work_lock);
    int file = event->shared_file;
    event->magic = 0;
    event->stream = NULL;
    pthread_mutex_unlock(&work_lock);
    if (file > 0) shared_event_end(file);
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream handle)
{
    CUstream stream;
    NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
    TRY(stream_resolve(handle, &stream));
    uint64_t number;
    pthread_mutex_lock(&work_lock);
    event->capture = stream->capture;
    CUresult rc = CUDA_SUCCESS; /* while capturing, an event is a dependency and no node */
    if (!stream->capture) rc = stream_submit_locked(stream, (struct op){.kind = OP_EVENT, .event = event}, &number);
    pthread_mutex_unlock(&work_lock);
    return rc;
}

API(cuEventRecord, (CUevent event, CUstream stream), (event, stream)) { return record(event, stream); }

API(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned flags), (event, stream, flags))
{
    NEED(flags <= 1, CUDA_ERROR_INVALID_VALUE);
    return record(event, stream);
}

API(cuEventQuery, (CUevent event), (event))
{
    NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
    NEED(!event->capture, CUDA_ERROR_CAPTURED_EVENT);
    pthread_mutex_lock(&work_lock);
    bool reached = is_reached(event);
    pthread_mutex_unlock(&work_lock);
    return reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API(cuEventSynchronize, (CUevent event), (event))
{
    NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
    NEED(!event->capture, CUDA_ERROR_CAPTURED_EVENT);
    pthread_mutex_lock(&work_lock);
    uint64_t recorded = event->shared ? __atomic_load_n(&event->shared->recorded, __ATOMIC_ACQUIRE) : 0;
    while (event->shared && __atomic_load_n(&event->shared->reached, __ATOMIC_ACQUIRE) < recorded) stream_await_others();
    while (!event->shared && !is_reached(event)) pthread_cond_wait(&work_progress, &work_lock);
    pthread_mutex_unlock(&work_lock);
    return CUDA_SUCCESS;
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
    NEED(milliseconds, CUDA_ERROR_INVALID_VALUE);
    NEED(is_event(start) && is_event(end) && start->stream && end->stream, CUDA_ERROR_INVALID_HANDLE);
    NEED(!((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
    pthread_mutex_lock(&work_lock);
    bool reached = is_reached(start) && is_reached(end);
    *milliseconds = (float)(end->time_ns - start->time_ns) / 1e6f;
    pthread_mutex_unlock(&work_lock);
    return reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end), (milliseconds, start, end)) { return elapsed(milliseconds, start, end); }
API(cuEventElapsedTime_v2, (float *milliseconds, CUevent start, CUevent end), (milliseconds, start, end)) { return elapsed(milliseconds, start, end); }

static CUresult wait_locked(CUstream stream, CUevent event)
{
    uint64_t number;
    if (event->capture) { /* joins the capture the event belongs to */
        NEED(!stream->capture || stream->capture == event->capture, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        stream->capture = event->capture;
        return CUDA_SUCCESS;
    }
    if (is_reached(event)) return CUDA_SUCCESS;
    NEED(!stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (event->shared) {
        uint64_t recorded = __atomic_load_n(&event->shared->recorded, __ATOMIC_ACQUIRE);
        return stream_submit_locked(stream, (struct op){.kind = OP_WAIT, .shared = event->shared, .shared_number = recorded}, &number);
    }
    struct dependency *wait = malloc(sizeof *wait);
    NEED(wait, CUDA_ERROR_OUT_OF_MEMORY);
    *wait = (struct dependency){event->stream, event->number};
    return stream_submit_locked(stream, (struct op){.kind = OP_WAIT, .waits = wait, .wait_count = 1}, &number);
}

API(cuStreamWaitEvent, (CUstream handle, CUevent event, unsigned flags), (handle, event, flags))
{
    CUstream stream;
    NEED(is_event(event), CUDA_ERROR_INVALID_HANDLE);
    NEED(flags <= 1, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    pthread_mutex_lock(&work_lock);
    CUresult rc = wait_locked(stream, event);
    pthread_mutex_unlock(&work_lock);
    return rc;
}
