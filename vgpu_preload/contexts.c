#include "contexts.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "device_facts.h"
#include "driver.h"

#define MOST_CAPTURES 256
/* Handles below mean the default streams, which another thread cannot ask about: 1 legacy, 2 per thread. */
#define FIRST_REAL_STREAM ((uintptr_t)3)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext known[MOST_CONTEXTS];
static unsigned int known_count;
static CUcontext primaries[MOST_DEVICES];
static struct {
    CUstream stream;
    CUcontext context; /* the current one when the capture began, which is the stream's in all but odd programs */
} captures[MOST_CAPTURES];
static _Atomic(unsigned int) capture_count;
static _Atomic(unsigned int) forgettings; /* a handle that was forgotten may come again */

static _Thread_local struct {
    CUcontext context;
    unsigned int forgettings;
} noted_last;

void context_note(CUcontext context)
{
    unsigned int now = atomic_load_explicit(&forgettings, memory_order_relaxed);
    if (context == NULL || (noted_last.context == context && noted_last.forgettings == now)) return;
    pthread_mutex_lock(&lock);
    unsigned int n = 0;
    while (n < known_count && known[n] != context) n++;
    if (n == known_count && n < MOST_CONTEXTS) known[known_count++] = context;
    pthread_mutex_unlock(&lock);
    noted_last.context = context;
    noted_last.forgettings = now;
}

static void forget_captures_of(CUcontext context)
{
    unsigned int count = atomic_load(&capture_count), kept = 0;
    for (unsigned int n = 0; n < count; n++)
        if (captures[n].context != context) captures[kept++] = captures[n];
    atomic_store(&capture_count, kept);
}

void context_forget(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (unsigned int n = 0; n < known_count; n++)
        if (known[n] == context) {
            known[n] = known[--known_count];
            break;
        }
    for (int device = 0; device < MOST_DEVICES; device++)
        if (primaries[device] == context) primaries[device] = NULL;
    forget_captures_of(context);
    atomic_fetch_add(&forgettings, 1);
    pthread_mutex_unlock(&lock);
}

unsigned int contexts_copy(CUcontext contexts[MOST_CONTEXTS])
{
    pthread_mutex_lock(&lock);
    unsigned int count = known_count;
    memcpy(contexts, known, count * sizeof *known);
    pthread_mutex_unlock(&lock);
    return count;
}

void context_note_primary(CUdevice device, CUcontext context)
{
    context_note(context);
    if (device < 0 || device >= MOST_DEVICES) return;
    pthread_mutex_lock(&lock);
    primaries[device] = context;
    pthread_mutex_unlock(&lock);
}

CUcontext context_primary(CUdevice device)
{
    if (device < 0 || device >= MOST_DEVICES) return NULL;
    pthread_mutex_lock(&lock);
    CUcontext context = primaries[device];
    pthread_mutex_unlock(&lock);
    return context;
}

void capture_begun(CUstream stream)
{
    CUcontext context = NULL;
    driver.cuCtxGetCurrent(&context);
    pthread_mutex_lock(&lock);
    unsigned int count = atomic_load(&capture_count);
    if (count < MOST_CAPTURES) {
        captures[count].stream = stream;
        captures[count].context = context;
        atomic_store(&capture_count, count + 1);
    }
    pthread_mutex_unlock(&lock);
}

static void forget_capture(CUstream stream)
{
    pthread_mutex_lock(&lock);
    unsigned int count = atomic_load(&capture_count);
    for (unsigned int n = 0; n < count; n++)
        if (captures[n].stream == stream) {
            captures[n] = captures[count - 1];
            atomic_store(&capture_count, count - 1);
            break;
        }
    pthread_mutex_unlock(&lock);
}

void capture_ended(CUstream stream, CUresult rc)
{
    /* Illegal state: this stream was not capturing, and its handle may name another thread's. */
    if (rc != CUDA_ERROR_ILLEGAL_STATE) forget_capture(stream);
}

void capture_stream_gone(CUstream stream)
{
    if (capture_is_active()) forget_capture(stream);
}

bool capture_is_active(void)
{
    return atomic_load(&capture_count) != 0;
}

static unsigned int captures_copy(CUstream streams[MOST_CAPTURES])
{
    pthread_mutex_lock(&lock);
    unsigned int count = atomic_load(&capture_count);
    for (unsigned int n = 0; n < count; n++) streams[n] = captures[n].stream;
    pthread_mutex_unlock(&lock);
    return count;
}

void captures_check(void)
{
    static CUstream streams[MOST_CAPTURES]; /* the helper is the only thread that comes here */
    unsigned int count = captures_copy(streams);
    for (unsigned int n = 0; n < count; n++) {
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        if ((uintptr_t)streams[n] < FIRST_REAL_STREAM) continue;
        CUresult rc = driver.cuStreamIsCapturing(streams[n], &status);
        if (rc == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE) forget_capture(streams[n]);
    }
}

void contexts_forget_all(void)
{
    pthread_mutex_init(&lock, NULL);
    known_count = 0;
    memset(primaries, 0, sizeof primaries);
    atomic_store(&capture_count, 0);
    atomic_fetch_add(&forgettings, 1);
}
