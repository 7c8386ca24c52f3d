#include "offers.h"

#include "driver.h"
#include "loose_descriptors.h"
#include "object_end.h"
#include "random.h"
#include "share_service.h"

#define CUDA_ERROR_OPERATING_SYSTEM 304

static bool has_source(struct memory_object *object)
{
    objects_lock();
    const struct kept_descriptor *source = object_descriptor(object);
    bool has_one = descriptor_is_still(source->number, source->identity);
    objects_unlock();
    return has_one;
}

/* Two threads may come here with the same object: the first one's open file stays. */
static CUresult make_source(struct memory_object *object)
{
    int descriptor = -1;
    if (has_source(object)) return CUDA_SUCCESS;
    descriptors_allow_more();
    CUresult rc = driver.cuMemExportToShareableHandle(&descriptor, object->handle,
                                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (rc == CUDA_SUCCESS) {
        descriptor = loose_note(descriptor);
        objects_lock();
        if (!descriptor_is_still(object->shared.number, object->shared.identity))
            loose_keep_copy(descriptor, &object->shared);
        objects_unlock();
        loose_close(descriptor);
    }
    descriptors_allow_as_before();
    if (rc != CUDA_SUCCESS) return rc;
    return has_source(object) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static bool sign(struct memory_object *object, struct share_handle *handle)
{
    objects_lock();
    if (!object->has_secret) object->has_secret = random_bytes(object->secret, sizeof object->secret);
    bool ok = object->has_secret;
    if (ok) object->ways_out |= BY_HANDLE;
    __builtin_memcpy(handle->secret, object->secret, sizeof handle->secret);
    handle->object = object->id;
    objects_unlock();
    return ok;
}

static CUresult offer(struct memory_object *object, CUipcMemHandle *bytes)
{
    struct share_handle handle;
    CUcontext context = NULL;
    if (bytes == NULL) return CUDA_ERROR_INVALID_VALUE;
    if (driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    CUresult rc = make_source(object);
    if (rc != CUDA_SUCCESS) return rc;
    if (!share_service_start(&handle) || !sign(object, &handle)) return CUDA_ERROR_OPERATING_SYSTEM;
    share_handle_write(&handle, bytes);
    return CUDA_SUCCESS;
}

bool offer_by_handle(CUdeviceptr address, CUipcMemHandle *bytes, CUresult *rc)
{
    objects_lock();
    struct memory_object *object = allocation_around(address);
    if (object != NULL && object->kind != OBJECT_ALLOC) object = NULL;
    if (object != NULL) object_pin_locked(object);
    objects_unlock();
    if (object == NULL) return false;
    *rc = offer(object, bytes);
    object_unpin(object);
    return true;
}

static struct memory_object *offered(const struct share_request *request)
{
    struct memory_object *object = object_with_id(request->object);
    if (object == NULL || object->kind != OBJECT_ALLOC || object->is_dead || object->requested == 0) return NULL;
    return object->has_secret && share_secret_is_same(object->secret, request->secret) ? object : NULL;
}

static void remember_peer(struct memory_object *object, int process)
{
    for (unsigned int n = 0; n < object->peer_count && n < MOST_PEERS; n++)
        if (object->peers[n] == process) return;
    if (object->peer_count < MOST_PEERS) object->peers[object->peer_count] = process;
    object->peer_count++;
}

void offer_give(const struct share_request *request, int process, struct share_reply *reply, int *descriptor)
{
    descriptors_allow_more();
    objects_lock();
    struct memory_object *object = offered(request);
    *descriptor = object != NULL ? loose_copy(object_descriptor(object)) : -1;
    reply->status = *descriptor >= 0 ? SHARE_GIVEN : SHARE_GONE;
    if (*descriptor >= 0) {
        reply->size = object->size;
        reply->requested = object->requested;
        remember_peer(object, process);
    }
    objects_unlock();
    descriptors_allow_as_before();
}

static struct memory_object *exportable(CUmemGenericAllocationHandle token)
{
    struct memory_object *object = object_of_token(token);
    return object != NULL && object->kind == OBJECT_VMM ? object : NULL;
}

bool offer_by_descriptor_again(CUmemGenericAllocationHandle token, int *descriptor)
{
    objects_lock();
    struct memory_object *object = exportable(token);
    bool is_there = object != NULL && kept_copy(object_descriptor(object), descriptor);
    if (is_there) object->ways_out |= BY_DESCRIPTOR;
    objects_unlock();
    return is_there;
}

void offer_made(CUmemGenericAllocationHandle token, int descriptor)
{
    objects_lock();
    struct memory_object *object = exportable(token);
    if (object != NULL) object->ways_out |= descriptor >= 0 ? BY_DESCRIPTOR : BY_FABRIC;
    if (object != NULL && descriptor < 0) object->obstacle = "given away by a fabric handle";
    if (object != NULL && descriptor >= 0) {
        kept_close(&object->shared);
        loose_keep_copy(descriptor, &object->shared);
    }
    objects_unlock();
}
