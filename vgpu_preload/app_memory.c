#include "app_memory.h"

#include "driver.h"
#include "held.h"
#include "object_end.h"

CUmemGenericAllocationHandle handle_of_token(CUmemGenericAllocationHandle token)
{
    objects_lock();
    struct memory_object *object = object_of_token(token);
    CUmemGenericAllocationHandle handle = object != NULL ? object->handle : token;
    objects_unlock();
    return handle;
}

bool app_memory_is_allocation(CUdeviceptr address, size_t size)
{
    objects_lock();
    struct memory_mapping *mapping = size > 0 ? mapping_around(address) : NULL;
    bool is_ours = mapping != NULL && (mapping->object->kind == OBJECT_ALLOC || mapping->object->kind == OBJECT_OPENED);
    objects_unlock();
    return is_ours;
}

void app_memory_mapped(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle token)
{
    objects_lock();
    struct memory_object *object = object_of_token(token);
    bool is_lost = object != NULL && mapping_new(object, address, size, offset) == NULL;
    if (is_lost) object->obstacle = "mapped where it cannot be followed";
    bool is_host = is_lost && object->kind == OBJECT_HOST;
    objects_unlock();
    if (is_host) held_add(BLOCKER_HOST_VMM, address, size, NULL);
}

/* The first mapping that begins in [*at, end); *at moves behind it. */
static struct memory_mapping *next_mapping(CUdeviceptr *at, CUdeviceptr end)
{
    while (*at < end) {
        struct memory_mapping *mapping = mapping_around(*at);
        CUdeviceptr here = *at;
        *at = mapping != NULL ? mapping->address + mapping->size : *at + STAGED_LEAST_BYTES;
        if (mapping != NULL && mapping->address >= here) return mapping;
    }
    return NULL;
}

struct memory_mapping *app_memory_hide(CUdeviceptr address, size_t size)
{
    struct memory_mapping *chain = NULL, *mapping;
    objects_lock();
    while ((mapping = next_mapping(&address, address + size)) != NULL) {
        mapping_hide(mapping);
        mapping->next_hidden = chain;
        chain = mapping;
    }
    objects_unlock();
    return chain;
}

void app_memory_show(struct memory_mapping *chain)
{
    objects_lock();
    for (; chain != NULL; chain = chain->next_hidden) mapping_show(chain);
    objects_unlock();
}

/* The memory of a handle that was released while it was mapped goes with its last mapping. */
static struct object_remains forget_mapping(struct memory_mapping *mapping)
{
    struct object_remains remains = no_remains;
    objects_lock();
    struct memory_object *object = mapping->object;
    mapping_remove(mapping);
    bool is_over = object->first_mapping == NULL && object->handle_references == 0;
    if (is_over) remains = object_end_locked(object);
    objects_unlock();
    return remains;
}

void app_memory_unmapped(struct memory_mapping *chain)
{
    while (chain != NULL) {
        struct memory_mapping *mapping = chain;
        chain = mapping->next_hidden;
        struct object_remains remains = forget_mapping(mapping);
        remains_release(&remains);
    }
}

static void note_access(struct memory_mapping *mapping, const CUmemAccessDesc *wanted)
{
    if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        mapping->object->obstacle = "accessible from the host";
    else if (wanted->location.id >= 0 && wanted->location.id < MOST_DEVICES)
        mapping->access[wanted->location.id] = (uint8_t)wanted->flags;
}

void app_memory_access_set(CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t count)
{
    CUdeviceptr end = address + size;
    objects_lock();
    struct memory_mapping *mapping = mapping_around(address);
    if (mapping != NULL && mapping->address < address) mapping->object->obstacle = "access set for a part of a mapping";
    while ((mapping = next_mapping(&address, end)) != NULL) {
        if (mapping->address + mapping->size > end) mapping->object->obstacle = "access set for a part of a mapping";
        for (size_t n = 0; n < count; n++) note_access(mapping, &wanted[n]);
    }
    objects_unlock();
}

bool app_memory_retain(CUdeviceptr address, CUmemGenericAllocationHandle *token)
{
    objects_lock();
    struct memory_mapping *mapping = mapping_around(address);
    if (mapping != NULL) {
        mapping->object->handle_references++;
        *token = token_of(mapping->object);
    }
    objects_unlock();
    return mapping != NULL;
}

bool app_memory_properties(CUmemGenericAllocationHandle token, CUmemGenericAllocationHandle *handle, int *asked)
{
    objects_lock();
    struct memory_object *object = object_of_token(token);
    if (object != NULL) *handle = object->handle, *asked = object->asked_handle_types;
    objects_unlock();
    return object != NULL;
}

void app_memory_set_obstacle(CUmemGenericAllocationHandle token, const char *obstacle)
{
    objects_lock();
    struct memory_object *object = object_of_token(token);
    if (object != NULL) object->obstacle = obstacle;
    objects_unlock();
}
