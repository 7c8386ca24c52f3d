#include "allocation.h"

#include <stdatomic.h>

#include "contexts.h"
#include "driver.h"
#include "held.h"
#include "object_end.h"
#include "peers.h"

#define ROUND_UP(value, to) (((value) + (to) - 1) / (to) * (to))

/* Objects whose freeing waits for the end of captures, linked by next_to_free under the lock of the objects. */
static struct memory_object *waiting;
static _Atomic(unsigned int) waiting_count;

/* What an allocation has got so far, given back in reverse when a step fails. */
struct backing {
    CUcontext context;
    CUdevice device;
    size_t size;
    CUdeviceptr address;
    CUmemGenericAllocationHandle handle;
    bool is_mapped;
};

/* What a device wants, asked once. */
static struct {
    _Atomic(size_t) granularity; /* 0: not asked yet */
    _Atomic(bool) has_rdma;
} devices[MOST_DEVICES];

static CUmemAllocationProp wanted_properties(CUdevice device)
{
    CUmemAllocationProp wanted = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
    return wanted;
}

static size_t granularity_of(CUdevice device)
{
    size_t granularity = atomic_load(&devices[device].granularity);
    if (granularity != 0) return granularity;
    int has_rdma = 0;
    CUmemAllocationProp wanted = wanted_properties(device);
    if (driver.cuMemGetAllocationGranularity(&granularity, &wanted, 0) != CUDA_SUCCESS) return 0;
    driver.cuDeviceGetAttribute(&has_rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
    if (granularity < STAGED_LEAST_BYTES) granularity = STAGED_LEAST_BYTES;
    atomic_store(&devices[device].has_rdma, has_rdma != 0);
    atomic_store(&devices[device].granularity, granularity);
    return granularity;
}

/* cuMemAlloc memory can be registered with a network card, so this should be too; where that is refused, without. */
static CUresult create(struct backing *backing, CUmemAllocationProp wanted)
{
    wanted.allocFlags.gpuDirectRDMACapable = atomic_load(&devices[backing->device].has_rdma);
    CUresult rc = driver.cuMemCreate(&backing->handle, backing->size, &wanted, 0);
    if (rc == CUDA_SUCCESS || rc == CUDA_ERROR_OUT_OF_MEMORY || !wanted.allocFlags.gpuDirectRDMACapable) return rc;
    wanted.allocFlags.gpuDirectRDMACapable = 0;
    return driver.cuMemCreate(&backing->handle, backing->size, &wanted, 0);
}

static bool map_backing(struct backing *backing, size_t bytes)
{
    size_t granularity = granularity_of(backing->device);
    CUmemAllocationProp wanted = wanted_properties(backing->device);
    CUmemAccessDesc access = {.location = wanted.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (granularity == 0 || bytes > SIZE_MAX - granularity) return false;
    backing->size = ROUND_UP(bytes, granularity);
    if (create(backing, wanted) != CUDA_SUCCESS) {
        backing->handle = 0;
        return false;
    }
    if (driver.cuMemAddressReserve(&backing->address, backing->size, granularity, 0, 0) != CUDA_SUCCESS) {
        backing->address = 0;
        return false;
    }
    backing->is_mapped = driver.cuMemMap(backing->address, backing->size, 0, backing->handle, 0) == CUDA_SUCCESS;
    return backing->is_mapped && driver.cuMemSetAccess(backing->address, backing->size, &access, 1) == CUDA_SUCCESS;
}

static void give_back(const struct backing *backing)
{
    if (backing->is_mapped) driver.cuMemUnmap(backing->address, backing->size);
    if (backing->handle != 0) driver.cuMemRelease(backing->handle);
    if (backing->address != 0) driver.cuMemAddressFree(backing->address, backing->size);
}

static bool enter_into_table(const struct backing *backing, size_t requested)
{
    objects_lock();
    struct memory_object *object = object_new(OBJECT_ALLOC, backing->size);
    struct memory_mapping *mapping =
        object != NULL ? mapping_new(object, backing->address, backing->size, 0) : NULL;
    if (mapping != NULL) {
        object->requested = requested;
        object->device = backing->device;
        object->handle = backing->handle;
        object->context = backing->context;
        mapping->access[backing->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    } else if (object != NULL) {
        object_remove(object);
    }
    objects_unlock();
    return mapping != NULL;
}

bool allocation_make(CUdeviceptr *address, size_t bytes)
{
    struct backing backing = {0};
    if (address == NULL || bytes < STAGED_LEAST_BYTES) return false;
    allocations_free_waiting();
    if (driver.cuCtxGetCurrent(&backing.context) != CUDA_SUCCESS || backing.context == NULL) return false;
    if (driver.cuCtxGetDevice(&backing.device) != CUDA_SUCCESS) return false;
    if (backing.device < 0 || backing.device >= MOST_DEVICES) return false;
    context_note(backing.context);
    if (!map_backing(&backing, bytes) || !enter_into_table(&backing, bytes)) {
        give_back(&backing);
        return false;
    }
    peers_admit(backing.address);
    *address = backing.address;
    return true;
}

/* The driver's pitch depends on the width alone, so one row tells it. */
static bool learn_pitch(size_t *pitch, size_t width, unsigned int element)
{
    CUdeviceptr row = 0;
    if (driver.cuMemAllocPitch_v2(&row, pitch, width, 1, element) != CUDA_SUCCESS) return false;
    driver.cuMemFree_v2(row);
    return true;
}

bool allocation_make_pitched(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    size_t bytes = 0, row = 0;
    if (address == NULL || pitch == NULL || width == 0 || height == 0) return false;
    if (__builtin_mul_overflow(width, height, &bytes) || bytes < STAGED_LEAST_BYTES) return false;
    if (!learn_pitch(&row, width, element) || __builtin_mul_overflow(row, height, &bytes)) return false;
    if (!allocation_make(address, bytes)) return false;
    *pitch = row;
    return true;
}

/* Work that is in flight may use the memory: cuMemFree waits for it, cuMemUnmap does not. */
static CUresult wait_for_context(CUcontext context)
{
    CUcontext current = NULL, popped = NULL;
    driver.cuCtxGetCurrent(&current);
    if (current == context) return driver.cuCtxSynchronize();
    if (driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return CUDA_SUCCESS; /* it is gone, and its work with it */
    CUresult rc = driver.cuCtxSynchronize();
    driver.cuCtxPopCurrent_v2(&popped);
    return rc;
}

/* Takes the object out of the tables before the driver may give its address to somebody else. */
static void free_taken(struct memory_object *object)
{
    objects_lock();
    struct memory_mapping *mapping = object->first_mapping;
    CUdeviceptr address = mapping->address;
    size_t size = mapping->size;
    bool is_mapped = mapping->is_in_driver;
    mapping_hide(mapping);
    mapping_remove(mapping);
    struct object_remains remains = object_end_locked(object);
    objects_unlock();
    if (is_mapped) driver.cuMemUnmap(address, size);
    remains_release(&remains);
    driver.cuMemAddressFree(address, size);
}

static struct memory_object *object_at(CUdeviceptr address, enum object_kind kind)
{
    struct memory_object *object = allocation_around(address);
    bool is_it = object != NULL && object->kind == kind && object->first_mapping->address == address;
    return is_it && object->requested > 0 ? object : NULL;
}

/* An object on its way out: nobody else finds it any more, a second free of the same address is refused. */
struct taken {
    struct memory_object *object; /* NULL: none */
    size_t requested;             /* to put it back */
};

static struct taken take_locked(struct memory_object *object)
{
    struct taken taken = {.object = object, .requested = object->requested};
    object->requested = 0;
    return taken;
}

static void put_back(const struct taken *taken)
{
    objects_lock();
    taken->object->requested = taken->requested;
    if (taken->object->kind == OBJECT_OPENED) taken->object->open_count = 1;
    objects_unlock();
}

static void put_off(struct memory_object *object)
{
    objects_lock();
    object->next_to_free = waiting;
    waiting = object;
    atomic_fetch_add(&waiting_count, 1);
    objects_unlock();
}

static CUresult free_or_put_off(const struct taken *taken)
{
    if (capture_is_active()) {
        put_off(taken->object);
        return CUDA_SUCCESS;
    }
    CUresult rc = wait_for_context(taken->object->context);
    if (rc == CUDA_SUCCESS)
        free_taken(taken->object);
    else
        put_back(taken);
    return rc;
}

bool allocation_free(CUdeviceptr address, CUresult *rc)
{
    struct taken taken = {0};
    objects_lock();
    struct memory_object *object = object_at(address, OBJECT_ALLOC);
    if (object != NULL) taken = take_locked(object);
    objects_unlock();
    if (object != NULL) *rc = free_or_put_off(&taken);
    return object != NULL;
}

bool allocation_close(CUdeviceptr address, CUresult *rc)
{
    struct taken taken = {0};
    objects_lock();
    struct memory_object *object = object_at(address, OBJECT_OPENED);
    if (object != NULL && --object->open_count == 0) taken = take_locked(object);
    objects_unlock();
    if (object != NULL) *rc = taken.object != NULL ? free_or_put_off(&taken) : CUDA_SUCCESS;
    return object != NULL;
}

static struct memory_object *next_waiting(void)
{
    objects_lock();
    struct memory_object *object = waiting;
    if (object != NULL) {
        waiting = object->next_to_free;
        atomic_fetch_sub(&waiting_count, 1);
    }
    objects_unlock();
    return object;
}

void allocations_free_waiting(void)
{
    struct memory_object *object;
    if (atomic_load_explicit(&waiting_count, memory_order_relaxed) == 0 || capture_is_active()) return;
    while ((object = next_waiting()) != NULL) {
        wait_for_context(object->context);
        free_taken(object);
    }
}

static struct memory_object *take_of_context(CUcontext context, unsigned int *place)
{
    struct memory_object *object = NULL;
    objects_lock();
    for (; object == NULL && *place < objects_end(); ++*place) {
        object = object_at_place(*place);
        bool is_its = object != NULL && (object->kind == OBJECT_ALLOC || object->kind == OBJECT_OPENED) &&
                      object->context == context && !object->is_dead && object->requested > 0;
        if (is_its)
            object->requested = object->open_count = 0;
        else
            object = NULL;
    }
    objects_unlock();
    return object;
}

void allocations_free_context(CUcontext context)
{
    unsigned int place = 0;
    struct memory_object *object;
    while ((object = take_of_context(context, &place)) != NULL) free_taken(object);
}

void context_ended(CUcontext context)
{
    if (context == NULL) return;
    context_forget(context);
    held_remove_context(context);
    allocations_free_context(context);
}

void allocations_forget_all(void)
{
    waiting = NULL;
    atomic_store(&waiting_count, 0);
}
