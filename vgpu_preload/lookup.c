#include "lookup.h"

#define RTLD_DEFAULT_HANDLE ((const void *)0)

/* RTLD_DEFAULT and RTLD_NEXT already lead to our exported symbol where it belongs, because we are in the global scope;
 * answering for them as well would hand an interposer behind us its own caller. */
static bool is_scope(const void *handle)
{
    return handle == RTLD_DEFAULT_HANDLE || handle == BEHIND_US;
}

enum lookup_route lookup_route(enum call_id id, const void *handle, const void *asker)
{
    if (id == CALL_NONE) return LOOKUP_PASS;
    if (!defined_elsewhere(id)) return LOOKUP_ABSENT;
    if (is_scope(handle)) return LOOKUP_PASS;
    /* Another interposer of dlsym wants the real one; ours would lead back to it. */
    if (is_linker_call(id) && defined_by_asker(id, asker)) return LOOKUP_PASS;
    return LOOKUP_ANSWER;
}
