#include "../lookup.h"

/* libcudart, PyTorch, cuda-bindings and ctypes find their first driver call here. */
WRAP(void *, dlsym, (void *handle, const char *name))
{
    const void *asker = __builtin_return_address(0);
    enum call_id id = call_named(name);
    enum lookup_route route = lookup_route(id, handle, asker);
    if (route == LOOKUP_PASS) TAIL_CALL return NEXT_IN_LINKER(dlsym)(handle, name);

    void *found = NEXT_IN_LINKER(dlsym)(route == LOOKUP_ABSENT ? BEHIND_US : handle, name);
    NOT_A_TAIL_CALL(found);
    if (found == NULL || route == LOOKUP_ABSENT) return found;
    return substitute(id, found, defined_by_asker(id, asker));
}
