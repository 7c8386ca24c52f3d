/* What device memory this process holds in a form that can be moved: physical objects and where they are mapped.
 *
 * An object is one piece of physical memory behind one handle of the driver. A cuMemAlloc of 2 MiB or more is one
 * object with one mapping; the application's own VMM memory is in the same table. The tables lie in memory of our own,
 * because the application's heap may belong to a thread that waits at the gate. Addresses are found through a two-
 * level table with one entry per 2 MiB, which is the granularity of the driver.
 *
 * One lock guards all of it. It is held for a few hundred instructions and never across a call of the driver.
 */
#ifndef VGPU_OBJECTS_H
#define VGPU_OBJECTS_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "descriptors.h"
#include "device_facts.h"
#include "share_handle.h"

#define STAGED_LEAST_BYTES (2ULL << 20)
#ifndef MOST_OBJECTS /* the tests build a library with a small table */
#define MOST_OBJECTS 32768 /* so many fit into one INVENTORY_IS frame */
#endif
#define MOST_MAPPINGS 65536

enum object_kind {
    OBJECT_FREE_SLOT,
    OBJECT_ALLOC,  /* cuMemAlloc and cuMemAllocPitch */
    OBJECT_VMM,    /* cuMemCreate by the application */
    OBJECT_IMPORT, /* cuMemImportFromShareableHandle by the application: goes and comes with its exporter's */
    OBJECT_OPENED, /* cuIpcOpenMemHandle of memory that another process with this library has allocated: the same */
    OBJECT_HOST,   /* host memory, made by cuMemCreate or imported: followed so that it is named, and never moved */
};

/* How an object was given to other processes. */
enum share_way { BY_DESCRIPTOR = 1, BY_HANDLE = 2, BY_FABRIC = 4 };

/* A descriptor is kept of each import, so that the agent can tell whose it is; of more than so many at once it is not. */
#ifndef MOST_IMPORT_DESCRIPTORS
#define MOST_IMPORT_DESCRIPTORS 4096
#endif

#define MOST_PEERS 4 /* are remembered by name; more are counted */

struct memory_mapping {
    CUdeviceptr address;
    size_t size;
    size_t offset;
    struct memory_object *object; /* NULL: a free entry */
    struct memory_mapping *next;  /* of the same object */
    struct memory_mapping *next_hidden;
    bool is_in_driver;            /* false between RELEASE and MAP */
    bool syncs_copies;            /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS was set */
    uint8_t access[MOST_DEVICES]; /* by device ordinal, as given to cuMemSetAccess */
};

struct memory_object {
    uint64_t id; /* unique in this process, never used again */
    enum object_kind kind;
    int device;
    size_t size;
    size_t requested;                    /* bytes the application asked for */
    CUmemGenericAllocationHandle handle; /* the driver's; changes when the memory comes back */
    bool is_in_driver;                   /* the handle is valid */
    int asked_handle_types;              /* what the application itself asked to share by */
    unsigned int handle_references;      /* how often the application can still release its handle */
    unsigned int pins;                   /* the helper is in a driver call with the handle */
    bool is_dead;                        /* gone for the application; the last pin releases the handle */
    bool is_announced;                   /* the agent has seen it in an INVENTORY_IS */
    unsigned int ways_out;               /* share_way: how the application gave it to other processes */
    const char *obstacle;                /* why it cannot be moved, NULL: it can */
    CUcontext context;                   /* OBJECT_ALLOC: where it was allocated */
    uint64_t buffer_id;                  /* as the driver first called it; 0: not asked yet */
    struct kept_descriptor kept;         /* what the agent handed over last */
    struct kept_descriptor shared;       /* the one open file that exporter and importers of this object have in hand */
    int arrived_fd;                      /* came in a FDS frame, MAP has not used it yet */
    bool has_secret;
    unsigned char secret[SHARE_SECRET_BYTES]; /* BY_HANDLE: whoever knows it may have the memory */
    int peers[MOST_PEERS];               /* process ids that fetched it by handle, as this process sees them */
    unsigned int peer_count;
    struct share_handle opened;          /* OBJECT_OPENED: the handle that it was opened with */
    unsigned int open_count;             /* OBJECT_OPENED: 0 while it is being opened or closed */
    struct memory_mapping *first_mapping;
    struct memory_object *next_to_free;
};

/* False when there is no address space for the tables. */
bool objects_make(void);

/* Memory of this process's own, which can be moved. */
static inline bool object_is_own(const struct memory_object *object)
{
    return object->kind == OBJECT_ALLOC || object->kind == OBJECT_VMM;
}

/* Device memory of another process. */
static inline bool object_is_import(const struct memory_object *object)
{
    return object->kind == OBJECT_IMPORT || object->kind == OBJECT_OPENED;
}

/* The open file of the object that is given to others. What came from the agent goes first: it is an import for the
 * driver, which does not export it again (measured: 1). */
static inline const struct kept_descriptor *object_descriptor(const struct memory_object *object)
{
    return object->kept.number >= 0 ? &object->kept : &object->shared;
}

/* After a fork: what the parent holds is not the child's. Leaves the lock free. */
void objects_forget_all(void);

void objects_lock(void);
void objects_unlock(void);

/* Everything below is called with the lock held. */

/* NULL when the table is full. */
struct memory_object *object_new(enum object_kind kind, size_t size);
void object_remove(struct memory_object *object);
struct memory_object *object_with_id(uint64_t id);

/* All that are not free: by place in the table; objects_end() is behind the last. */
struct memory_object *object_at_place(unsigned int place);
unsigned int objects_end(void);

/* The handle that the application holds in place of the driver's. */
CUmemGenericAllocationHandle token_of(const struct memory_object *object);
struct memory_object *object_of_token(CUmemGenericAllocationHandle token);

/* NULL when the table is full or the range is not of whole 2 MiB pages below 2^48. */
struct memory_mapping *mapping_new(struct memory_object *object, CUdeviceptr address, size_t size, size_t offset);

/* Out of the address table and back, around an unmapping that may fail; only a hidden one may be removed. */
void mapping_remove(struct memory_mapping *mapping);
void mapping_hide(struct memory_mapping *mapping);
void mapping_show(struct memory_mapping *mapping);

struct memory_mapping *mapping_around(CUdeviceptr address);

/* The cuMemAlloc memory that contains `address`, as far as the application asked for it, this process's own or opened
 * from another; NULL: none of ours. */
struct memory_object *allocation_around(CUdeviceptr address);

/* Ids that were announced and are gone since: the agent learns of them in RESTED. Gives how many fitted into `ids`. */
unsigned int objects_gone(uint64_t *ids, unsigned int most);
void objects_start_announcing(void);

struct objects_held {
    unsigned int count;
    uint64_t bytes;
};
struct objects_held objects_held(void);

/* How many objects are memory of other processes. */
unsigned int objects_imports(void);

/* Why memory of another process cannot be taken away and given back; NULL: it can, or it is away. */
const char *import_obstacle(const struct memory_object *object);

#endif
