#include "../lookup.h"

#if VGPU_HAVE_DLVSYM

/* As dlsym, for programs that name the version they want. */
WRAP(void *, dlvsym, (void *handle, const char *name, const char *version))
{
    const void *asker = __builtin_return_address(0);
    enum call_id id = call_named(name);
    enum lookup_route route = lookup_route(id, handle, asker);
    if (route == LOOKUP_PASS) TAIL_CALL return NEXT_IN_LINKER(dlvsym)(handle, name, version);

    void *found = NEXT_IN_LINKER(dlvsym)(route == LOOKUP_ABSENT ? BEHIND_US : handle, name, version);
    NOT_A_TAIL_CALL(found);
    if (found == NULL || route == LOOKUP_ABSENT) return found;
    return substitute(id, found, defined_by_asker(id, asker));
}

#endif
