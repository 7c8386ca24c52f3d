#include "pointer_facts.h"

#include "driver.h"
#include "objects.h"

#define MEMORY_TYPE_DEVICE 2

static struct memory_object *object_around(CUdeviceptr pointer)
{
    struct memory_mapping *mapping = mapping_around(pointer);
    if (mapping == NULL || mapping->object->kind == OBJECT_IMPORT) return NULL;
    return mapping->object->kind == OBJECT_VMM ? mapping->object : allocation_around(pointer);
}

static bool read_facts(CUdeviceptr pointer, struct pointer_facts *facts)
{
    objects_lock();
    struct memory_object *object = object_around(pointer);
    if (object != NULL)
        *facts = (struct pointer_facts){
            .pointer = pointer,
            .is_allocation = object->kind != OBJECT_VMM,
            .can_be_offered = object->kind == OBJECT_ALLOC,
            .base = object->first_mapping->address,
            .requested = object->requested,
            .context = object->context,
            .device = object->device,
            .asked_handle_types = object->asked_handle_types,
            .buffer_id = object->buffer_id,
        };
    objects_unlock();
    return object != NULL;
}

/* Libraries keep it to notice that an address was freed and given again, so it must outlive a move: the driver's first
 * answer is kept. */
static void learn_buffer_id(struct pointer_facts *facts)
{
    uint64_t id = 0;
    if (driver.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, facts->pointer) != CUDA_SUCCESS) return;
    objects_lock();
    struct memory_object *object = object_around(facts->pointer);
    if (object != NULL && object->buffer_id == 0) object->buffer_id = id;
    if (object != NULL) facts->buffer_id = object->buffer_id;
    objects_unlock();
}

bool pointer_facts_of(CUdeviceptr pointer, struct pointer_facts *facts)
{
    return read_facts(pointer, facts);
}

static enum pointer_answer answer_buffer_id(const struct pointer_facts *facts, uint64_t *data)
{
    struct pointer_facts learnt = *facts;
    if (!facts->is_allocation) return ASK_DRIVER; /* mappings of one object have ids of their own */
    if (learnt.buffer_id == 0) learn_buffer_id(&learnt);
    if (learnt.buffer_id == 0) return ASK_DRIVER;
    *data = learnt.buffer_id;
    return ANSWERED;
}

enum pointer_answer pointer_answer(const struct pointer_facts *facts, CUpointer_attribute attribute, void *data)
{
    if (attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES) {
        *(uint64_t *)data = (uint64_t)facts->asked_handle_types;
        return ANSWERED;
    }
    if (!facts->is_allocation) return ASK_DRIVER;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = facts->context; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned int *)data = MEMORY_TYPE_DEVICE; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = facts->pointer; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: return NOT_FOR_THIS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: return answer_buffer_id(facts, data);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned char *)data = facts->can_be_offered; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned char *)data = 0; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = facts->device; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)data = facts->base; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = facts->requested; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned char *)data = 1; return ANSWERED;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)data = NULL; return ANSWERED;
    default: return ASK_DRIVER;
    }
}
