/* How an object ends: out of the tables under the lock, given back to the driver without it. */
#ifndef VGPU_OBJECT_END_H
#define VGPU_OBJECT_END_H

#include "objects.h"

/* What is left of an object that is in no table any more. */
struct object_remains {
    CUmemGenericAllocationHandle handle; /* the driver's, to be released; 0: none */
    struct kept_descriptor kept, shared;
};

extern const struct object_remains no_remains;

/* Called with the lock held, after the last mapping and reference are gone. While somebody uses the handle the end is
 * left to them. */
struct object_remains object_end_locked(struct memory_object *object);

/* Without the lock. */
void remains_close(struct object_remains *remains);   /* the descriptors alone */
void remains_release(struct object_remains *remains); /* all of it */

/* A pinned object stays, whatever the application frees meanwhile. Pinned under the lock, unpinned without it. */
void object_pin_locked(struct memory_object *object);
void object_unpin(struct memory_object *object);

#endif
