#include "object_end.h"

#include "driver.h"

const struct object_remains no_remains = {.kept = {.number = -1}, .shared = {.number = -1}};

struct object_remains object_end_locked(struct memory_object *object)
{
    if (object->pins > 0) {
        object->is_dead = true;
        return no_remains;
    }
    struct object_remains remains = {
        .handle = object->is_in_driver ? object->handle : 0, .kept = object->kept, .shared = object->shared};
    object_remove(object);
    return remains;
}

/* An open descriptor keeps the memory alive as well as a handle does. */
void remains_close(struct object_remains *remains)
{
    kept_close(&remains->kept);
    kept_close(&remains->shared);
}

void remains_release(struct object_remains *remains)
{
    remains_close(remains);
    if (remains->handle != 0) driver.cuMemRelease(remains->handle);
    remains->handle = 0;
}

void object_pin_locked(struct memory_object *object)
{
    object->pins++;
}

void object_unpin(struct memory_object *object)
{
    struct object_remains remains = no_remains;
    objects_lock();
    if (--object->pins == 0 && object->is_dead) remains = object_end_locked(object);
    objects_unlock();
    remains_release(&remains);
}
