/* What the driver holds for this process and only the driver can move, and what nobody can move: the blockers.
 *
 * Counted so that the agent's sum of all bytes comes out right, and so that a refusal names what stands in the way. Not
 * complete for the driver's own needs: modules, contexts and graphs have no size that could be asked.
 */
#ifndef VGPU_HELD_H
#define VGPU_HELD_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

enum held_kind {
    HELD_NOTHING,
    HELD_SMALL, /* cuMemAlloc below 2 MiB */
    HELD_LARGE, /* cuMemAlloc that could not be backed by an object */
    HELD_POOL,  /* cuMemAllocAsync and cuMemAllocFromPoolAsync */
    HELD_ARRAY,
    HELD_VMM, /* cuMemCreate on a device that cannot be shared by descriptor */
    HELD_LAST_OF_DRIVER = HELD_VMM,
    BLOCKER_MANAGED,
    BLOCKER_MULTICAST,
    BLOCKER_IMPORT,       /* these four where the table of objects was full: of a descriptor, */
    BLOCKER_EXPORT,       /* given away by descriptor, */
    BLOCKER_FABRIC,       /* of a fabric handle or given away by one, */
    BLOCKER_HOST_VMM,     /* host memory, also where it is mapped so that it cannot be followed */
    BLOCKER_IPC_OPENED,   /* these two of the driver's own memory; what we have backed is in the table of objects */
    BLOCKER_IPC_EXPORTED,
    BLOCKER_IPC_EVENT, /* no hindrance: the driver keeps it (gpu_state/blockers.py) */
    BLOCKER_POOL_SHARED,
    BLOCKER_EXTERNAL_MEMORY,
    BLOCKER_DMABUF,
    HELD_KINDS
};

struct held_entry {
    uint64_t key; /* address or handle */
    uint64_t bytes;
    enum held_kind kind;
    CUcontext context;
};

bool held_make(void);
void held_forget_all(void);

/* `key` is an address or a handle of the driver; the same key of the same kind is counted once. */
void held_add(enum held_kind kind, uint64_t key, uint64_t bytes, CUcontext context);

/* cuMemAlloc memory of the driver's own. */
void held_add_allocation(CUdeviceptr address, uint64_t bytes);

/* Sized by its shape; levels of a mipmapped array are not counted. */
void held_add_array(uint64_t key, const CUDA_ARRAY3D_DESCRIPTOR *shape);

/* The key of what has left the process: another than the address itself, so that freeing the address keeps it. */
uint64_t held_export_key(uint64_t address);

void held_remove(uint64_t key);

/* For a freeing that may fail: takes the entry out (HELD_NOTHING: there was none) and puts it back. */
struct held_entry held_take(uint64_t key);
void held_put_back(const struct held_entry *entry);

/* Everything that belonged to a context that was destroyed. */
void held_remove_context(CUcontext context);

struct held_sum {
    uint64_t count;
    uint64_t bytes;
};
struct held_sum held_sum(enum held_kind kind);

/* False: there has never been one of this kind. Costs one load. */
bool held_has_had(enum held_kind kind);

/* Entry by entry, for the blockers: the first at or behind `place` that is one; the next place to ask, 0 at the end. */
unsigned int held_next_blocker(unsigned int place, struct held_entry *entry);

/* A form of a call that is newer than the table was given to the application: it passes no gate. Programs look their
 * calls up before they initialise the driver, so this is kept apart from the table. Gives the last one's address, 0:
 * none. */
void held_note_unknown_call(const void *function);
uint64_t held_unknown_call(void);

/* Memory of the driver's own is given to another process: from now on it is of that kind. */
void held_given_away(uint64_t key, enum held_kind kind);

/* As INVENTORY_IS calls the kind, and what it means for a reader. */
const char *held_name(enum held_kind kind);
const char *held_meaning(enum held_kind kind);

#endif
