#include "openings.h"

#include "clock.h"
#include "contexts.h"
#include "driver.h"
#include "gate.h"
#include "loose_descriptors.h"
#include "objects.h"
#include "peers.h"
#include "share_fetch.h"
#include "share_service.h"

#define OPEN_DEADLINE_MS 60000 /* for an exporter that lives and does not answer */
#define PAUSE_US 2000

#define NOT_YET (-1)

/* Where and in which context the application wants it. */
struct wish {
    const struct share_handle *handle;
    CUcontext context;
    CUdevice device;
};

static struct memory_object *opened_before(const struct wish *wish)
{
    for (unsigned int place = 0; place < objects_end(); place++) {
        struct memory_object *object = object_at_place(place);
        if (object == NULL || object->kind != OBJECT_OPENED || object->is_dead) continue;
        bool is_closing = object->first_mapping != NULL && object->open_count == 0;
        if (!is_closing && object->context == wish->context && share_handle_is_same(&object->opened, wish->handle))
            return object;
    }
    return NULL;
}

/* CUDA_SUCCESS: it is open already. NOT_YET without a `fresh`: another thread is about to open it. */
static CUresult open_again_or_begin(const struct wish *wish, CUdeviceptr *address, struct memory_object **fresh)
{
    CUresult rc = NOT_YET;
    *fresh = NULL;
    objects_lock();
    struct memory_object *object = opened_before(wish);
    if (object != NULL && object->first_mapping != NULL) {
        object->open_count++;
        *address = object->first_mapping->address;
        rc = CUDA_SUCCESS;
    } else if (object == NULL && (*fresh = object_new(OBJECT_OPENED, 0)) == NULL) {
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (object == NULL) {
        (*fresh)->context = wish->context;
        (*fresh)->device = wish->device;
        (*fresh)->opened = *wish->handle;
    }
    objects_unlock();
    return rc;
}

/* What the driver has given so far, given back in reverse when a step fails. */
struct opening {
    size_t size;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    bool is_mapped;
    CUdevice owner; /* the device of the memory, -1: none that this process sees */
};

static CUdevice owner_of(CUmemGenericAllocationHandle handle)
{
    CUmemAllocationProp found = {.location = {.id = -1}};
    CUresult rc = driver.cuMemGetAllocationPropertiesFromHandle(&found, handle);
    bool is_seen = rc == CUDA_SUCCESS && found.location.id >= 0 && found.location.id < MOST_DEVICES;
    return is_seen ? found.location.id : -1;
}

static CUresult allow(const struct opening *opening, CUdevice device)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return driver.cuMemSetAccess(opening->address, opening->size, &access, 1);
}

/* The opening context's device must reach it; the memory's own device is let in too where it can be. */
static CUresult map(struct opening *opening, int descriptor, CUdevice device)
{
    CUresult rc = driver.cuMemImportFromShareableHandle(&opening->handle, (void *)(intptr_t)descriptor,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (rc != CUDA_SUCCESS) {
        opening->handle = 0;
        return rc;
    }
    opening->owner = owner_of(opening->handle);
    rc = driver.cuMemAddressReserve(&opening->address, opening->size, STAGED_LEAST_BYTES, 0, 0);
    if (rc != CUDA_SUCCESS) {
        opening->address = 0;
        return rc;
    }
    rc = driver.cuMemMap(opening->address, opening->size, 0, opening->handle, 0);
    opening->is_mapped = rc == CUDA_SUCCESS;
    if (rc == CUDA_SUCCESS) rc = allow(opening, device);
    if (rc == CUDA_SUCCESS && opening->owner >= 0 && opening->owner != device && allow(opening, opening->owner) != CUDA_SUCCESS)
        opening->owner = -1;
    return rc;
}

static void give_back(const struct opening *opening)
{
    if (opening->is_mapped) driver.cuMemUnmap(opening->address, opening->size);
    if (opening->handle != 0) driver.cuMemRelease(opening->handle);
    if (opening->address != 0) driver.cuMemAddressFree(opening->address, opening->size);
}

static bool enter(struct memory_object *object, const struct opening *opening, size_t requested, int descriptor)
{
    objects_lock();
    struct memory_mapping *mapping = mapping_new(object, opening->address, opening->size, 0);
    if (mapping != NULL) {
        mapping->access[object->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        if (opening->owner >= 0) object->device = opening->owner;
        mapping->access[object->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        object->size = opening->size;
        object->requested = requested;
        object->handle = opening->handle;
        object->open_count = 1;
        if (objects_imports() <= MOST_IMPORT_DESCRIPTORS) loose_keep_copy(descriptor, &object->shared);
    }
    objects_unlock();
    return mapping != NULL;
}

static void give_up(struct memory_object *object)
{
    objects_lock();
    object_remove(object);
    objects_unlock();
}

static CUresult open_fetched(struct memory_object *object, const struct share_reply *reply, int descriptor,
                             CUdeviceptr *address)
{
    struct opening opening = {.size = reply->size, .owner = -1};
    CUresult rc = map(&opening, descriptor, object->device);
    if (rc == CUDA_SUCCESS && !enter(object, &opening, reply->requested, descriptor)) rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc != CUDA_SUCCESS) {
        give_back(&opening);
        return rc;
    }
    peers_admit(opening.address);
    *address = opening.address;
    return CUDA_SUCCESS;
}

/* As the driver answers (measured): 400 at once without the exporter, 1 for memory that it has freed. */
static CUresult code_of(enum fetch_end end)
{
    if (end == FETCH_AGAIN) return NOT_YET;
    return end == FETCH_GONE ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
}

static CUresult open_fresh(struct memory_object *object, const struct share_handle *handle, CUdeviceptr *address)
{
    struct share_reply reply;
    int descriptor;
    enum fetch_end end = share_fetch(handle, &reply, &descriptor);
    CUresult rc = end == FETCHED ? open_fetched(object, &reply, descriptor, address) : code_of(end);
    loose_close(descriptor);
    if (rc != CUDA_SUCCESS) give_up(object);
    return rc;
}

/* One attempt, inside the gate; nothing is held when it says NOT_YET. */
static CUresult attempt(CUdeviceptr *address, const struct share_handle *handle, unsigned int flags)
{
    struct wish wish = {.handle = handle};
    struct memory_object *fresh;
    if (address == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    if (driver.cuCtxGetCurrent(&wish.context) != CUDA_SUCCESS || wish.context == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    if (share_service_is_mine(handle)) return CUDA_ERROR_INVALID_CONTEXT; /* as the driver says to its own */
    CUresult rc = driver.cuCtxGetDevice(&wish.device);
    if (rc != CUDA_SUCCESS) return rc;
    if (wish.device < 0 || wish.device >= MOST_DEVICES) return CUDA_ERROR_INVALID_CONTEXT;
    context_note(wish.context);
    rc = open_again_or_begin(&wish, address, &fresh);
    return fresh != NULL ? open_fresh(fresh, handle, address) : rc;
}

/* Between the attempts the gate is left: an exporter whose memory is away may be away because this process is next. */
CUresult opening_make(CUdeviceptr *address, const struct share_handle *handle, unsigned int flags)
{
    int64_t end = clock_now_ms() + OPEN_DEADLINE_MS;
    for (;;) {
        CUresult rc;
        {
            PASS_GATE();
            rc = attempt(address, handle, flags);
        }
        if (rc != NOT_YET) return rc;
        if (clock_now_ms() >= end) return CUDA_ERROR_MAP_FAILED;
        clock_sleep_us(PAUSE_US);
    }
}
