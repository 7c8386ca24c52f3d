#define _GNU_SOURCE
#include "memory_moves.h"

#include <unistd.h>

#include "descriptors.h"
#include "driver.h"
#include "object_end.h"

/* ---- EXPORT ------------------------------------------------------------------------------------ */

static struct memory_object *pin(uint64_t id)
{
    objects_lock();
    struct memory_object *object = object_with_id(id);
    if (object != NULL && (!object_is_own(object) || object->is_dead || !object->is_in_driver)) object = NULL;
    if (object != NULL) object_pin_locked(object);
    objects_unlock();
    return object;
}

/* An importer cannot export (measured: 1): what came from the agent is given by the descriptor it came with. */
static int descriptor_of(const struct memory_object *object, struct fault *fault)
{
    int descriptor = -1;
    if (object->kept.number >= 0) {
        if (!kept_copy(&object->kept, &descriptor))
            *fault = (struct fault){.what = "the descriptor was closed by the application", .object = object->id};
    } else {
        CUresult rc = driver.cuMemExportToShareableHandle(&descriptor, object->handle,
                                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (rc != CUDA_SUCCESS)
            *fault = (struct fault){.what = "cuMemExportToShareableHandle", .code = rc, .object = object->id};
    }
    return fault->what == NULL ? descriptor_move_up(descriptor) : -1;
}

struct batch {
    int descriptors[DESCRIPTORS_A_FRAME];
    uint64_t ids[DESCRIPTORS_A_FRAME];
    size_t count;
};

static void close_batch(struct batch *batch)
{
    for (size_t n = 0; n < batch->count; n++) close(batch->descriptors[n]);
    batch->count = 0;
}

static bool send_batch(const struct request *request, struct batch *batch)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"objects\":[");
    for (size_t n = 0; n < batch->count; n++) {
        if (n > 0) json_raw(&json, ",");
        json_integer(&json, (long)batch->ids[n]);
    }
    json_raw(&json, "]}");
    bool sent = batch->count == 0 || reply_send_descriptors(request, &json, batch->descriptors, batch->count);
    close_batch(batch);
    return sent;
}

/* True: in the batch, or gone meanwhile. */
static bool add_to_batch(struct batch *batch, uint64_t id, struct fault *fault)
{
    struct memory_object *object = pin(id);
    if (object == NULL) return true;
    int descriptor = descriptor_of(object, fault);
    object_unpin(object);
    if (descriptor < 0) {
        if (fault->what == NULL) *fault = (struct fault){.what = "no descriptor is left", .object = id};
        return false;
    }
    batch->descriptors[batch->count] = descriptor;
    batch->ids[batch->count++] = id;
    return true;
}

static bool send_exported(const struct request *request, uint64_t count)
{
    struct json_writer json = reply_begin();
    json_raw(&json, "{\"count\":");
    json_integer(&json, (long)count);
    json_raw(&json, "}");
    return reply_send(request, FRAME_EXPORTED, &json);
}

static bool export_all(const struct request *request, struct object_walk *walk)
{
    struct batch batch = {.count = 0};
    struct fault fault = {0};
    uint64_t id, count = 0;
    while (walk_next(walk, &id)) {
        size_t before = batch.count;
        if (!add_to_batch(&batch, id, &fault)) {
            close_batch(&batch);
            return reply_failed(request, &fault);
        }
        count += batch.count - before;
        if (batch.count == DESCRIPTORS_A_FRAME && !send_batch(request, &batch)) return false;
    }
    if (!walk_was_whole(walk)) {
        close_batch(&batch);
        return reply_failed(request, &list_is_broken);
    }
    return send_batch(request, &batch) && send_exported(request, count);
}

bool answer_export(const struct request *request)
{
    struct object_walk walk;
    if (!walk_begin(&walk, request)) return reply_failed(request, &list_is_broken);
    descriptors_allow_more();
    bool ok = export_all(request, &walk);
    descriptors_allow_as_before();
    return ok;
}

/* ---- RELEASE ----------------------------------------------------------------------------------- */
/* The gate is closed from here on: nobody else changes the tables, so they are read without the lock where the driver
 * is called in between. */

static struct fault unmap_object(struct memory_object *object)
{
    for (struct memory_mapping *mapping = object->first_mapping; mapping != NULL; mapping = mapping->next) {
        if (!mapping->is_in_driver) continue;
        CUresult rc = driver.cuMemUnmap(mapping->address, mapping->size);
        if (rc != CUDA_SUCCESS) return (struct fault){.what = "cuMemUnmap", .code = rc, .object = object->id};
        mapping->is_in_driver = false;
    }
    return (struct fault){0};
}

static struct fault release_object(struct memory_object *object)
{
    struct fault fault = unmap_object(object);
    if (fault.what != NULL) return fault;
    CUresult rc = object->is_in_driver ? driver.cuMemRelease(object->handle) : CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS) return (struct fault){.what = "cuMemRelease", .code = rc, .object = object->id};
    object->is_in_driver = false;
    kept_close(&object->kept);
    kept_close(&object->shared);
    return fault;
}

struct fault release_all(bool with_imports)
{
    struct object_walk walk = {.is_all = true, .with_imports = with_imports};
    struct fault fault = {0};
    uint64_t id;
    while (fault.what == NULL && walk_next(&walk, &id)) fault = release_object(object_with_id(id));
    return fault;
}

/* ---- FDS and MAP ------------------------------------------------------------------------------- */

static void close_arrived(struct memory_object *object)
{
    if (object->arrived_fd >= 0) close(object->arrived_fd);
    object->arrived_fd = -1;
}

/* Descriptors for objects that are not here are closed: the answer to MAP says which are missing. */
bool take_descriptors_of(const struct request *request)
{
    struct object_walk walk;
    size_t n = 0;
    uint64_t id;
    bool is_list = walk_begin(&walk, request) && !walk.is_all;
    descriptors_allow_more();
    for (; is_list && n < request->descriptor_count && walk_next(&walk, &id); n++) {
        int descriptor = descriptor_move_up(request->descriptors[n]);
        struct memory_object *object = object_with_id(id);
        if (object == NULL) {
            if (descriptor >= 0) close(descriptor);
            continue;
        }
        close_arrived(object);
        object->arrived_fd = descriptor;
    }
    for (; n < request->descriptor_count; n++) close(request->descriptors[n]);
    descriptors_allow_as_before();
    return true;
}

static CUresult set_access(const struct memory_mapping *mapping)
{
    CUmemAccessDesc wanted[MOST_DEVICES];
    size_t count = 0;
    for (int device = 0; device < MOST_DEVICES; device++)
        if (mapping->access[device] != 0)
            wanted[count++] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                                                .flags = mapping->access[device]};
    return count > 0 ? driver.cuMemSetAccess(mapping->address, mapping->size, wanted, count) : CUDA_SUCCESS;
}

static CUresult map_one(const struct memory_object *object, struct memory_mapping *mapping, const char **step)
{
    *step = "cuMemMap";
    CUresult rc = driver.cuMemMap(mapping->address, mapping->size, mapping->offset, object->handle, 0);
    if (rc != CUDA_SUCCESS) return rc;
    mapping->is_in_driver = true;
    *step = "cuMemSetAccess";
    rc = set_access(mapping);
    if (rc != CUDA_SUCCESS || !mapping->syncs_copies) return rc;
    int yes = 1;
    *step = "cuPointerSetAttribute";
    return driver.cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, mapping->address);
}

static struct fault map_all_of(struct memory_object *object)
{
    for (struct memory_mapping *mapping = object->first_mapping; mapping != NULL; mapping = mapping->next) {
        const char *step;
        CUresult rc = map_one(object, mapping, &step);
        if (rc != CUDA_SUCCESS) return (struct fault){.what = step, .code = rc, .object = object->id};
    }
    return (struct fault){0};
}

static void keep_arrived(struct memory_object *object)
{
    object->kept = descriptor_keep(object->arrived_fd);
    object->arrived_fd = -1;
}

static struct fault map_object(struct memory_object *object)
{
    if (object->is_in_driver) {
        close_arrived(object);
        return (struct fault){0};
    }
    if (object->arrived_fd < 0) return (struct fault){.what = "no descriptor came for it", .object = object->id};
    CUresult rc = driver.cuMemImportFromShareableHandle(
        &object->handle, (void *)(intptr_t)object->arrived_fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (rc != CUDA_SUCCESS)
        return (struct fault){.what = "cuMemImportFromShareableHandle", .code = rc, .object = object->id};
    struct fault fault = map_all_of(object);
    if (fault.what == NULL) {
        object->is_in_driver = true;
        keep_arrived(object);
        return fault;
    }
    unmap_object(object);
    driver.cuMemRelease(object->handle);
    return fault;
}

struct fault map_objects(struct object_walk *walk)
{
    struct fault fault = {0};
    uint64_t id;
    walk->with_imports = true;
    while (fault.what == NULL && walk_next(walk, &id)) {
        struct memory_object *object = object_with_id(id);
        fault = object != NULL ? map_object(object) : (struct fault){.what = "no such object", .object = id};
    }
    if (fault.what == NULL && !walk_was_whole(walk)) fault = list_is_broken;
    return fault;
}

struct fault first_missing(void)
{
    struct object_walk walk = {.is_all = true, .with_imports = true};
    uint64_t id;
    while (walk_next(&walk, &id))
        if (!object_with_id(id)->is_in_driver) return (struct fault){.what = "the object is not mapped", .object = id};
    return (struct fault){0};
}

/* Another thread of the parent may have been in the middle of an entry: numbers that cannot be ours are left alone. */
void descriptors_give_up(void)
{
    for (unsigned int place = 0; place < objects_end(); place++) {
        struct memory_object *object = object_at_place(place);
        if (object == NULL) continue;
        kept_close(&object->kept);
        kept_close(&object->shared);
        if (object->arrived_fd > 200) close_arrived(object);
    }
}
