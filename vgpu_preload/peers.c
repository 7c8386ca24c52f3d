#include "peers.h"

#include <stdatomic.h>

#include "driver.h"
#include "objects.h"

/* How many contexts of device `from` have access to device `to`. */
static _Atomic(int) pairs[MOST_DEVICES][MOST_DEVICES];
static _Atomic(bool) are_used;

static bool is_device(CUdevice device)
{
    return device >= 0 && device < MOST_DEVICES;
}

static bool devices_of(CUcontext other, CUdevice *here, CUdevice *there)
{
    CUcontext popped = NULL;
    if (driver.cuCtxGetDevice(here) != CUDA_SUCCESS) return false;
    if (driver.cuCtxPushCurrent_v2(other) != CUDA_SUCCESS) return false;
    CUresult rc = driver.cuCtxGetDevice(there);
    driver.cuCtxPopCurrent_v2(&popped);
    return rc == CUDA_SUCCESS && is_device(*here) && is_device(*there);
}

/* Where the allocation at this place lies, if it is on `device`. */
static struct memory_mapping *mapping_of_place(unsigned int place, CUdevice device)
{
    struct memory_object *object = object_at_place(place);
    if (object == NULL || object->is_dead || object->device != device) return NULL;
    if (object->kind != OBJECT_ALLOC && object->kind != OBJECT_OPENED) return NULL;
    return object->first_mapping;
}

static void set_access(CUdeviceptr address, size_t size, CUdevice device, int flags)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, .flags = flags};
    driver.cuMemSetAccess(address, size, &access, 1);
}

static void set_access_of_all(CUdevice from, CUdevice to, int flags)
{
    for (unsigned int place = 0;; place++) {
        objects_lock();
        bool is_end = place >= objects_end();
        struct memory_mapping *mapping = is_end ? NULL : mapping_of_place(place, to);
        CUdeviceptr address = mapping != NULL ? mapping->address : 0;
        size_t size = mapping != NULL ? mapping->size : 0;
        if (mapping != NULL) mapping->access[from] = (uint8_t)flags;
        objects_unlock();
        if (is_end) return;
        if (address != 0) set_access(address, size, from, flags);
    }
}

void peers_enabled(CUcontext other)
{
    CUdevice here, there;
    if (!devices_of(other, &here, &there) || here == there) return;
    atomic_store(&are_used, true);
    if (atomic_fetch_add(&pairs[here][there], 1) == 0)
        set_access_of_all(here, there, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

void peers_disabled(CUcontext other)
{
    CUdevice here, there;
    if (!devices_of(other, &here, &there) || here == there) return;
    if (atomic_fetch_sub(&pairs[here][there], 1) == 1) set_access_of_all(here, there, 0);
}

void peers_admit(CUdeviceptr address)
{
    if (!atomic_load_explicit(&are_used, memory_order_relaxed)) return;
    for (CUdevice from = 0; from < MOST_DEVICES; from++) {
        objects_lock();
        struct memory_mapping *mapping = mapping_around(address);
        bool is_open = mapping != NULL && atomic_load(&pairs[from][mapping->object->device]) > 0;
        size_t size = is_open ? mapping->size : 0;
        if (is_open) mapping->access[from] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        objects_unlock();
        if (is_open) set_access(address, size, from, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
}

void peers_forget_all(void)
{
    for (int from = 0; from < MOST_DEVICES; from++)
        for (int to = 0; to < MOST_DEVICES; to++) atomic_store(&pairs[from][to], 0);
    atomic_store(&are_used, false);
}
