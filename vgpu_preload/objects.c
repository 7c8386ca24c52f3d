#define _GNU_SOURCE
#include "objects.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE_SHIFT 21
#define LEAF_SHIFT 13
#define TOP_SHIFT 14 /* 2^(14 + 13 + 21) = 2^48 */
#define LEAF_PAGES (1U << LEAF_SHIFT)
#define TOP_ENTRIES (1U << TOP_SHIFT)

/* Marks a handle as ours; the driver's are small numbers or addresses of the process. */
#define TOKEN_MARK 0x5647ULL
#define TOKEN_SHIFT 48

struct page_leaf {
    struct memory_mapping *pages[LEAF_PAGES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct memory_object *objects;
static struct memory_mapping *mappings;
static struct page_leaf **leaves;
static uint64_t *gone;
static unsigned int object_end, mapping_end, gone_count;
static struct memory_object *free_objects; /* below the end, to be used again */
static struct memory_mapping *free_mappings;
static uint64_t ids_given;
static struct objects_held held;
static unsigned int imports;

void objects_lock(void)
{
    pthread_mutex_lock(&lock);
}

void objects_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

static void *own_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

bool objects_make(void)
{
    if (objects == NULL) objects = own_memory(MOST_OBJECTS * sizeof *objects);
    if (mappings == NULL) mappings = own_memory(MOST_MAPPINGS * sizeof *mappings);
    if (leaves == NULL) leaves = own_memory(TOP_ENTRIES * sizeof(struct page_leaf *));
    if (gone == NULL) gone = own_memory(MOST_OBJECTS * sizeof *gone);
    return objects != NULL && mappings != NULL && leaves != NULL && gone != NULL;
}

void objects_forget_all(void)
{
    pthread_mutex_init(&lock, NULL);
    if (leaves != NULL)
        for (unsigned int n = 0; n < TOP_ENTRIES; n++) {
            if (leaves[n] != NULL) munmap(leaves[n], sizeof *leaves[n]);
            leaves[n] = NULL;
        }
    if (objects != NULL) memset(objects, 0, object_end * sizeof *objects);
    if (mappings != NULL) memset(mappings, 0, mapping_end * sizeof *mappings);
    object_end = mapping_end = gone_count = 0;
    free_objects = NULL;
    free_mappings = NULL;
    held = (struct objects_held){0, 0};
    imports = 0;
}

/* A place is used again; the id tells the new object from the old one. */
static struct memory_object *free_object_place(void)
{
    struct memory_object *object = free_objects;
    if (object == NULL) return object_end < MOST_OBJECTS ? &objects[object_end++] : NULL;
    free_objects = object->next_to_free;
    return object;
}

struct memory_object *object_new(enum object_kind kind, size_t size)
{
    struct memory_object *object = free_object_place();
    if (object == NULL) return NULL;
    *object = (struct memory_object){.kind = kind, .size = size, .arrived_fd = -1, .is_in_driver = true};
    object->kept = object->shared = no_descriptor;
    object->id = ++ids_given * MOST_OBJECTS + (uint64_t)(object - objects);
    if (object_is_own(object)) {
        held.count++;
        held.bytes += size;
    } else if (object_is_import(object)) {
        imports++;
    }
    return object;
}

void object_remove(struct memory_object *object)
{
    if (object->is_announced && gone_count < MOST_OBJECTS) gone[gone_count++] = object->id;
    if (object_is_own(object)) {
        held.count--;
        held.bytes -= object->size;
    } else if (object_is_import(object)) {
        imports--;
    }
    object->kind = OBJECT_FREE_SLOT;
    object->next_to_free = free_objects;
    free_objects = object;
}

struct memory_object *object_with_id(uint64_t id)
{
    struct memory_object *object = &objects[id % MOST_OBJECTS];
    return id % MOST_OBJECTS < object_end && object->kind != OBJECT_FREE_SLOT && object->id == id ? object : NULL;
}

struct memory_object *object_at_place(unsigned int place)
{
    return place < object_end && objects[place].kind != OBJECT_FREE_SLOT ? &objects[place] : NULL;
}

unsigned int objects_end(void)
{
    return object_end;
}

CUmemGenericAllocationHandle token_of(const struct memory_object *object)
{
    return TOKEN_MARK << TOKEN_SHIFT | object->id;
}

struct memory_object *object_of_token(CUmemGenericAllocationHandle token)
{
    if (token >> TOKEN_SHIFT != TOKEN_MARK || objects == NULL) return NULL;
    struct memory_object *object = object_with_id(token & ((1ULL << TOKEN_SHIFT) - 1));
    if (object == NULL || object->is_dead) return NULL;
    bool is_applications = object->kind == OBJECT_VMM || object->kind == OBJECT_IMPORT || object->kind == OBJECT_HOST;
    return is_applications ? object : NULL;
}

static struct memory_mapping *free_mapping_place(void)
{
    struct memory_mapping *mapping = free_mappings;
    if (mapping == NULL) return mapping_end < MOST_MAPPINGS ? &mappings[mapping_end++] : NULL;
    free_mappings = mapping->next;
    return mapping;
}

static bool is_of_pages(CUdeviceptr address, size_t size)
{
    CUdeviceptr end = address + size;
    return size > 0 && end > address && end >> (TOP_SHIFT + LEAF_SHIFT + PAGE_SHIFT) == 0 &&
           ((address | size) & ((1ULL << PAGE_SHIFT) - 1)) == 0;
}

static struct memory_mapping **page_of(CUdeviceptr address)
{
    if (address >> (TOP_SHIFT + LEAF_SHIFT + PAGE_SHIFT) != 0) return NULL;
    struct page_leaf *leaf = leaves[address >> (LEAF_SHIFT + PAGE_SHIFT)];
    return leaf != NULL ? &leaf->pages[(address >> PAGE_SHIFT) % LEAF_PAGES] : NULL;
}

static bool make_leaves(CUdeviceptr address, size_t size)
{
    CUdeviceptr last = (address + size - 1) >> (LEAF_SHIFT + PAGE_SHIFT);
    for (CUdeviceptr n = address >> (LEAF_SHIFT + PAGE_SHIFT); n <= last; n++)
        if (leaves[n] == NULL && (leaves[n] = own_memory(sizeof *leaves[n])) == NULL) return false;
    return true;
}

static void fill_pages(const struct memory_mapping *mapping, struct memory_mapping *value)
{
    for (CUdeviceptr at = mapping->address; at < mapping->address + mapping->size; at += 1ULL << PAGE_SHIFT)
        *page_of(at) = value;
}

struct memory_mapping *mapping_new(struct memory_object *object, CUdeviceptr address, size_t size, size_t offset)
{
    if (!is_of_pages(address, size) || !make_leaves(address, size)) return NULL;
    struct memory_mapping *mapping = free_mapping_place();
    if (mapping == NULL) return NULL;
    *mapping = (struct memory_mapping){.address = address, .size = size, .offset = offset, .is_in_driver = true};
    mapping->object = object;
    mapping->next = object->first_mapping;
    object->first_mapping = mapping;
    fill_pages(mapping, mapping);
    return mapping;
}

void mapping_hide(struct memory_mapping *mapping)
{
    fill_pages(mapping, NULL);
}

void mapping_show(struct memory_mapping *mapping)
{
    fill_pages(mapping, mapping);
}

void mapping_remove(struct memory_mapping *mapping)
{
    struct memory_mapping **link = &mapping->object->first_mapping;
    while (*link != mapping) link = &(*link)->next;
    *link = mapping->next;
    mapping->object = NULL;
    mapping->next = free_mappings;
    free_mappings = mapping;
}

struct memory_mapping *mapping_around(CUdeviceptr address)
{
    if (leaves == NULL) return NULL;
    struct memory_mapping **page = page_of(address);
    return page != NULL ? *page : NULL;
}

struct memory_object *allocation_around(CUdeviceptr address)
{
    struct memory_mapping *mapping = mapping_around(address);
    if (mapping == NULL) return NULL;
    if (mapping->object->kind != OBJECT_ALLOC && mapping->object->kind != OBJECT_OPENED) return NULL;
    return address - mapping->address < mapping->object->requested ? mapping->object : NULL;
}

unsigned int objects_gone(uint64_t *ids, unsigned int most)
{
    unsigned int count = gone_count < most ? gone_count : most;
    memcpy(ids, gone, count * sizeof *ids);
    return count;
}

void objects_start_announcing(void)
{
    gone_count = 0;
}

struct objects_held objects_held(void)
{
    return held;
}

unsigned int objects_imports(void)
{
    return imports;
}

/* What is being opened has no descriptor yet, and at rest nothing is. */
const char *import_obstacle(const struct memory_object *object)
{
    const struct kept_descriptor *kept = object_descriptor(object);
    bool is_being_opened = object->kind == OBJECT_OPENED && object->first_mapping == NULL;
    if (object->obstacle != NULL) return object->obstacle;
    if (object->kind == OBJECT_IMPORT && object->asked_handle_types != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return "not imported by a POSIX file descriptor";
    if (!object->is_in_driver || is_being_opened) return NULL;
    if (kept->number < 0) return "no descriptor of it is kept";
    return descriptor_is_still(kept->number, kept->identity) ? NULL : "the application closed its descriptor";
}
