/* Streams: ordered queues of bounded depth, each with a worker thread that starts with the first work.
 *
 * A piece of work has the number it was given in its stream and may wait for numbers of other streams; those were given earlier,
 * so waits cannot form a ring. The legacy default stream waits for all blocking streams of its context and they for it.
 * Structs of destroyed streams and events are kept and used again (numbers go on), so a late waiter never meets freed memory.
 */
#include <time.h>

#include "driver.h"

#define STREAM_MAGIC 0x6d61657274535753ull

pthread_mutex_t work_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t work_progress = PTHREAD_COND_INITIALIZER;
static CUstream all_streams;
static uint64_t next_id = 1;

void stream_await_others(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 500000;
    if (until.tv_nsec >= 1000000000) until = (struct timespec){until.tv_sec + 1, until.tv_nsec - 1000000000};
    pthread_cond_timedwait(&work_progress, &work_lock, &until);
}

static bool waits_for_others(const struct op *op)
{
    return op->kind == OP_WAIT && op->shared && __atomic_load_n(&op->shared->reached, __ATOMIC_ACQUIRE) < op->shared_number;
}

static bool waits_are_over(const struct op *op)
{
    for (int n = 0; n < op->wait_count; n++)
        if (op->waits[n].stream->completed < op->waits[n].number) return false;
    return true;
}

static void op_release(struct op *op)
{
    free(op->staged);
    free(op->waits);
    free(op);
}

static void *stream_worker(void *argument)
{
    CUstream stream = argument;
    gate_mark_worker_thread();
    pthread_mutex_lock(&work_lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&stream->wake, &work_lock);
        struct op *op = stream->first;
        while (!waits_are_over(op)) pthread_cond_wait(&work_progress, &work_lock);
        while (waits_for_others(op)) stream_await_others();
        stream->first = op->next;
        if (!stream->first) stream->last = NULL;
        pthread_mutex_unlock(&work_lock);
        op_execute(stream, op);
        pthread_mutex_lock(&work_lock);
        stream->completed = op->number;
        pthread_cond_broadcast(&work_progress);
        op_release(op);
    }
    return NULL;
}

static bool start_worker(CUstream stream)
{
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    stream->has_worker = pthread_create(&thread, &attributes, stream_worker, stream) == 0;
    pthread_attr_destroy(&attributes);
    return stream->has_worker;
}

static bool is_blocking(CUstream stream) { return !(stream->flags & CU_STREAM_NON_BLOCKING); }

static bool add_wait(struct op *op, CUstream on, uint64_t number)
{
    if (number <= on->completed) return true;
    struct dependency *grown = realloc(op->waits, sizeof *grown * (size_t)(op->wait_count + 1));
    if (!grown) return false;
    op->waits = grown;
    op->waits[op->wait_count++] = (struct dependency){on, number};
    return true;
}

/* What the legacy default stream means for this piece of work. */
static bool add_legacy_waits(CUstream stream, struct op *op)
{
    if (!is_blocking(stream)) return true;
    for (CUstream other = all_streams; other; other = other->next)
        if (other != stream && other->context == stream->context && is_blocking(other) && (stream->is_default || other->is_default))
            if (!add_wait(op, other, other->submitted)) return false;
    return true;
}

static CUresult default_stream_may_run(CUstream stream)
{
    if (!stream->is_default) return CUDA_SUCCESS;
    for (CUstream other = all_streams; other; other = other->next)
        if (other->context == stream->context && is_blocking(other) && other->capture) {
            capture_invalidate(other->capture);
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return CUDA_SUCCESS;
}

static void discard(struct op *op)
{
    free(op->staged);
    free(op->waits);
}

static CUresult enqueue(CUstream stream, struct op content, uint64_t *number)
{
    struct op *op = malloc(sizeof *op);
    if (!op || !add_legacy_waits(stream, &content) || (!stream->has_worker && !start_worker(stream))) {
        discard(&content);
        free(op);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    content.number = *number = ++stream->submitted;
    content.next = NULL;
    *op = content;
    if (op->kind == OP_EVENT) {
        op->event->stream = stream;
        op->event->number = op->number;
        op->shared = op->event->shared;
        if (op->shared) op->shared_number = __atomic_add_fetch(&op->shared->recorded, 1, __ATOMIC_ACQ_REL);
    }
    if (stream->last) stream->last->next = op;
    else stream->first = op;
    stream->last = op;
    pthread_cond_signal(&stream->wake);
    return CUDA_SUCCESS;
}

/* The real driver takes about as many before the call that launches one more waits for room. */
#define QUEUE_DEPTH 1024

static void wait_for_room(CUstream stream)
{
    while (!stream->capture && stream->submitted - stream->completed >= QUEUE_DEPTH) pthread_cond_wait(&work_progress, &work_lock);
}

CUresult stream_submit_locked(CUstream stream, struct op op, uint64_t *number)
{
    *number = 0;
    wait_for_room(stream);
    if (stream->capture) return graph_record(stream->capture, op);
    CUresult rc = default_stream_may_run(stream);
    if (rc == CUDA_SUCCESS) return enqueue(stream, op, number);
    discard(&op);
    return rc;
}

CUresult stream_submit(CUstream stream, struct op op, bool wait)
{
    uint64_t number;
    pthread_mutex_lock(&work_lock);
    CUresult rc = stream_submit_locked(stream, op, &number);
    while (rc == CUDA_SUCCESS && wait && stream->completed < number) pthread_cond_wait(&work_progress, &work_lock);
    pthread_mutex_unlock(&work_lock);
    return rc;
}

CUresult stream_open(CUcontext context, unsigned flags, int priority, bool is_default, CUstream *out)
{
    pthread_mutex_lock(&work_lock);
    CUstream stream = all_streams;
    while (stream && stream->context) stream = stream->next;
    if (!stream && (stream = calloc(1, sizeof *stream))) {
        pthread_cond_init(&stream->wake, NULL);
        stream->next = all_streams;
        all_streams = stream;
    }
    if (stream) {
        stream->magic = STREAM_MAGIC;
        stream->context = context;
        stream->flags = flags;
        stream->priority = priority;
        stream->is_default = is_default;
        stream->id = next_id++;
        *out = stream;
    }
    pthread_mutex_unlock(&work_lock);
    return stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void wait_for(CUstream stream, uint64_t number)
{
    while (stream->completed < number) pthread_cond_wait(&work_progress, &work_lock);
}

static void retire(CUstream stream)
{
    wait_for(stream, stream->submitted);
    if (stream->capture) capture_invalidate(stream->capture);
    stream->capture = NULL;
    stream->magic = 0;
    stream->context = NULL;
}

void stream_retire_all(CUcontext context)
{
    pthread_mutex_lock(&work_lock);
    for (CUstream stream = all_streams; stream; stream = stream->next)
        if (stream->context == context) retire(stream);
    pthread_mutex_unlock(&work_lock);
}

void stream_wait_context(CUcontext context)
{
    pthread_mutex_lock(&work_lock);
    for (CUstream stream = all_streams; stream; stream = stream->next)
        if (!context || stream->context == context) wait_for(stream, stream->submitted);
    pthread_mutex_unlock(&work_lock);
}

bool stream_all_idle(void)
{
    bool idle = true;
    pthread_mutex_lock(&work_lock);
    for (CUstream stream = all_streams; stream; stream = stream->next) idle = idle && stream->completed == stream->submitted;
    pthread_mutex_unlock(&work_lock);
    return idle;
}

/* Handles 0, 1 and 2 (per-thread default) all mean the legacy default stream of the current context. */
CUresult stream_resolve(CUstream handle, CUstream *out)
{
    if ((uintptr_t)handle <= 2) {
        CUcontext context = context_current();
        NEED(context, CUDA_ERROR_INVALID_CONTEXT);
        *out = context->default_stream;
        return CUDA_SUCCESS;
    }
    NEED(handle->magic == STREAM_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    *out = handle;
    return CUDA_SUCCESS;
}

/* The origin and every stream that joined through an event. */
void stream_leave_capture(struct capture *capture)
{
    for (CUstream stream = all_streams; stream; stream = stream->next)
        if (stream->capture == capture) stream->capture = NULL;
}

/* Waiting or asking for the state of a stream that captures is an error and spoils the capture. */
CUresult stream_refuse_capturing(CUstream stream)
{
    pthread_mutex_lock(&work_lock);
    CUresult rc = CUDA_SUCCESS;
    if (stream->capture) {
        capture_invalidate(stream->capture);
        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&work_lock);
    return rc;
}

static CUresult create(CUstream *out, unsigned flags, int priority)
{
    CUcontext context = context_current();
    NEED(out && flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    return stream_open(context, flags, priority, false, out);
}

API(cuStreamCreate, (CUstream *out, unsigned flags), (out, flags)) { return create(out, flags, 0); }
API(cuStreamCreateWithPriority, (CUstream *out, unsigned flags, int priority), (out, flags, priority)) { return create(out, flags, priority); }

API(cuStreamDestroy_v2, (CUstream stream), (stream))
{
    NEED((uintptr_t)stream > 2 && stream->magic == STREAM_MAGIC && !stream->is_default, CUDA_ERROR_INVALID_HANDLE);
    pthread_mutex_lock(&work_lock);
    retire(stream);
    pthread_mutex_unlock(&work_lock);
    return CUDA_SUCCESS;
}

API(cuStreamSynchronize, (CUstream handle), (handle))
{
    CUstream stream;
    TRY(stream_resolve(handle, &stream));
    TRY(stream_refuse_capturing(stream));
    if (stream->is_default) stream_wait_context(stream->context);
    pthread_mutex_lock(&work_lock);
    wait_for(stream, stream->submitted);
    pthread_mutex_unlock(&work_lock);
    return CUDA_SUCCESS;
}

API(cuStreamQuery, (CUstream handle), (handle))
{
    CUstream stream;
    TRY(stream_resolve(handle, &stream));
    TRY(stream_refuse_capturing(stream));
    pthread_mutex_lock(&work_lock);
    bool done = stream->completed == stream->submitted;
    pthread_mutex_unlock(&work_lock);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API(cuStreamGetFlags, (CUstream handle, unsigned *flags), (handle, flags))
{
    CUstream stream;
    NEED(flags, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

API(cuStreamGetPriority, (CUstream handle, int *priority), (handle, priority))
{
    CUstream stream;
    NEED(priority, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

API(cuStreamGetCtx, (CUstream handle, CUcontext *context), (handle, context))
{
    CUstream stream;
    NEED(context, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    *context = stream->context;
    return CUDA_SUCCESS;
}

API(cuStreamGetId, (CUstream handle, unsigned long long *id), (handle, id))
{
    CUstream stream;
    NEED(id, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    *id = stream->id;
    return CUDA_SUCCESS;
}

API(cuStreamGetDevice, (CUstream handle, CUdevice *device), (handle, device))
{
    CUstream stream;
    NEED(device, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

API(cuLaunchHostFunc, (CUstream handle, CUhostFn fn, void *user), (handle, fn, user))
{
    CUstream stream;
    NEED(fn, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    return stream_submit(stream, (struct op){.kind = OP_HOST, .host_fn = fn, .user = user}, false);
}

API(cuStreamAddCallback, (CUstream handle, CUstreamCallback callback, void *user, unsigned flags), (handle, callback, user, flags))
{
    CUstream stream;
    NEED(callback && flags == 0, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    TRY(stream_refuse_capturing(stream));
    return stream_submit(stream, (struct op){.kind = OP_CALLBACK, .callback = callback, .user = user}, false);
}
