/* Contexts: created, primary, and the stack of current ones each thread has. */
#include "driver.h"

#define CONTEXT_MAGIC 0x7478746e6f435753ull
#define STACK_DEPTH 32

static CUcontext all_contexts;
static unsigned long long next_id = 1;
static struct { CUcontext context; int references; unsigned flags; } primary[MAX_DEVICES];
static _Thread_local CUcontext stack[STACK_DEPTH];
static _Thread_local int depth;

bool context_is_valid(CUcontext context)
{
    pthread_mutex_lock(&driver_lock);
    CUcontext seen = all_contexts;
    while (seen && seen != context) seen = seen->next;
    pthread_mutex_unlock(&driver_lock);
    return seen != NULL;
}

CUcontext context_current(void)
{
    CUcontext top = depth ? stack[depth - 1] : NULL;
    return top && context_is_valid(top) ? top : NULL;
}

static CUresult context_new(int device, unsigned flags, bool is_primary, CUcontext *out)
{
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    CUcontext context = calloc(1, sizeof *context);
    NEED(context, CUDA_ERROR_OUT_OF_MEMORY);
    *context = (struct CUctx_st){.magic = CONTEXT_MAGIC, .device = device, .flags = flags, .is_primary = is_primary};
    pthread_mutex_lock(&driver_lock);
    CUresult rc = device_claim(device);
    context->id = next_id++;
    if (rc == CUDA_SUCCESS) {
        context->next = all_contexts;
        all_contexts = context;
    }
    pthread_mutex_unlock(&driver_lock);
    if (rc == CUDA_SUCCESS) rc = stream_open(context, 0, 0, true, &context->default_stream);
    if (rc == CUDA_SUCCESS) *out = context;
    else free(context);
    return rc;
}

static void context_end(CUcontext context)
{
    __atomic_store_n(&context->is_ending, true, __ATOMIC_RELEASE);
    stream_wait_context(context);
    stream_retire_all(context);
    module_free_context(context);
    memory_free_context(context);
    pthread_mutex_lock(&driver_lock);
    CUcontext *link = &all_contexts;
    while (*link != context) link = &(*link)->next;
    *link = context->next;
    pthread_mutex_unlock(&driver_lock);
    free(context);
}

static CUresult push(CUcontext context)
{
    NEED(depth < STACK_DEPTH, CUDA_ERROR_OUT_OF_MEMORY);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *out, unsigned flags, CUdevice device)
{
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    TRY(context_new(device, flags, false, out));
    return push(*out);
}

API(cuCtxCreate_v2, (CUcontext *out, unsigned flags, CUdevice device), (out, flags, device)) { return create(out, flags, device); }

API(cuCtxCreate_v3, (CUcontext *out, void *affinity, int count, unsigned flags, CUdevice device), (out, affinity, count, flags, device))
{
    NEED(!affinity && !count, CUDA_ERROR_NOT_SUPPORTED);
    return create(out, flags, device);
}

API(cuCtxCreate_v4, (CUcontext *out, void *parameters, unsigned flags, CUdevice device), (out, parameters, flags, device))
{
    (void)parameters; /* affinity and graphics interoperation: nothing to set here */
    return create(out, flags, device);
}

API(cuCtxDestroy_v2, (CUcontext context), (context))
{
    NEED(context_is_valid(context), CUDA_ERROR_INVALID_CONTEXT);
    NEED(!context->is_primary, CUDA_ERROR_INVALID_CONTEXT);
    if (depth && stack[depth - 1] == context) depth--;
    context_end(context);
    return CUDA_SUCCESS;
}

API(cuCtxPushCurrent_v2, (CUcontext context), (context))
{
    NEED(context_is_valid(context), CUDA_ERROR_INVALID_CONTEXT);
    return push(context);
}

API(cuCtxPopCurrent_v2, (CUcontext *out), (out))
{
    NEED(depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (out) *out = stack[depth];
    return CUDA_SUCCESS;
}

API(cuCtxSetCurrent, (CUcontext context), (context))
{
    NEED(!context || context_is_valid(context), CUDA_ERROR_INVALID_CONTEXT);
    if (depth) depth--;
    return context ? push(context) : CUDA_SUCCESS;
}

API(cuCtxGetCurrent, (CUcontext *out), (out))
{
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = context_current();
    return CUDA_SUCCESS;
}

API(cuCtxGetDevice, (CUdevice *device), (device))
{
    CUcontext context = context_current();
    NEED(device, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    *device = context->device;
    return CUDA_SUCCESS;
}

API(cuCtxGetDevice_v2, (CUdevice *device, CUcontext context), (device, context))
{
    if (!context) context = context_current();
    NEED(device, CUDA_ERROR_INVALID_VALUE);
    NEED(context && context_is_valid(context), CUDA_ERROR_INVALID_CONTEXT);
    *device = context->device;
    return CUDA_SUCCESS;
}

API(cuCtxSynchronize_v2, (CUcontext context), (context))
{
    if (!context) context = context_current();
    NEED(context && context_is_valid(context), CUDA_ERROR_INVALID_CONTEXT);
    stream_wait_context(context);
    return CUDA_SUCCESS;
}

API(cuCtxSynchronize, (void), ()) { return cuCtxSynchronize_v2_body(NULL); }

API(cuCtxGetApiVersion, (CUcontext context, unsigned *version), (context, version))
{
    NEED(version, CUDA_ERROR_INVALID_VALUE);
    NEED(!context || context_is_valid(context), CUDA_ERROR_INVALID_CONTEXT);
    *version = 3020;
    return CUDA_SUCCESS;
}

API(cuCtxGetFlags, (unsigned *flags), (flags))
{
    CUcontext context = context_current();
    NEED(flags, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    *flags = context->flags;
    return CUDA_SUCCESS;
}

API(cuCtxGetId, (CUcontext context, unsigned long long *id), (context, id))
{
    if (!context) context = context_current();
    NEED(id, CUDA_ERROR_INVALID_VALUE);
    NEED(context && context_is_valid(context), CUDA_ERROR_INVALID_CONTEXT);
    *id = context->id;
    return CUDA_SUCCESS;
}

API(cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest))
{
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

REFUSED(cuCtxGetLimit, (size_t *value, int limit), CUDA_ERROR_UNSUPPORTED_LIMIT)
REFUSED(cuCtxSetLimit, (int limit, size_t value), CUDA_ERROR_UNSUPPORTED_LIMIT)
/* Counted only: any device of this driver can touch any memory. What can be asked is what VMM mappings say. */
static bool peer_enabled[MAX_DEVICES][MAX_DEVICES];

static CUresult set_peer(CUcontext peer, bool wanted, CUresult otherwise)
{
    CUcontext context = context_current();
    NEED(context && peer && context_is_valid(peer), CUDA_ERROR_INVALID_CONTEXT);
    NEED(context->device != peer->device, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    pthread_mutex_lock(&driver_lock);
    bool *enabled = &peer_enabled[context->device][peer->device], is_change = *enabled != wanted;
    *enabled = wanted;
    pthread_mutex_unlock(&driver_lock);
    return is_change ? CUDA_SUCCESS : otherwise;
}

API(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags))
{
    NEED(flags == 0, CUDA_ERROR_INVALID_VALUE);
    return set_peer(peer, true, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
}

API(cuCtxDisablePeerAccess, (CUcontext peer), (peer)) { return set_peer(peer, false, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED); }

API(cuDevicePrimaryCtxRetain, (CUcontext *out, CUdevice device), (out, device))
{
    static pthread_mutex_t retain_lock = PTHREAD_MUTEX_INITIALIZER;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    CUresult rc = CUDA_SUCCESS;
    pthread_mutex_lock(&retain_lock);
    if (!primary[device].context) rc = context_new(device, primary[device].flags, true, &primary[device].context);
    if (rc == CUDA_SUCCESS) primary[device].references++;
    *out = primary[device].context;
    pthread_mutex_unlock(&retain_lock);
    return rc;
}

static void primary_end(CUdevice device)
{
    CUcontext context = primary[device].context;
    primary[device].context = NULL;
    primary[device].references = 0;
    if (context) context_end(context);
}

API(cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device))
{
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    NEED(primary[device].references > 0, CUDA_ERROR_INVALID_CONTEXT);
    if (--primary[device].references == 0) primary_end(device);
    return CUDA_SUCCESS;
}

API(cuDevicePrimaryCtxReset_v2, (CUdevice device), (device))
{
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    primary_end(device);
    return CUDA_SUCCESS;
}

API(cuDevicePrimaryCtxSetFlags_v2, (CUdevice device, unsigned flags), (device, flags))
{
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    primary[device].flags = flags;
    if (primary[device].context) primary[device].context->flags = flags;
    return CUDA_SUCCESS;
}

API(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active), (device, flags, active))
{
    NEED(flags && active, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *flags = primary[device].flags;
    *active = primary[device].context != NULL;
    return CUDA_SUCCESS;
}
