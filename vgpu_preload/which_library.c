#include "which_library.h"

#include "loaded_objects.h"

/* Defined by every NCCL and by no profiler that wraps some of its calls. */
#define IN_EVERY_NCCL "ncclCommCuDevice"
#define CACHED_LIBRARIES 4

/* A function that an application looked up first, which stands for its library. */
static _Atomic(void *) followed_function[2];
static _Atomic(int) followed_call[2];

_Atomic(bool) has_several_nccl;
static _Atomic(unsigned long long) surveyed;

static struct {
    _Atomic(const void *) library;
    _Atomic(void *) functions[CALL_COUNT];
} cache[CACHED_LIBRARIES];

static bool is_loaded(enum call_id id, const void *function)
{
    return loaded_beside(function, call_name(id)) == function;
}

bool library_is_followed(enum call_id id, void *found)
{
    int family = is_nccl_call(id);
    if (family == 1) nccl_survey();
    void *function = atomic_load(&followed_function[family]);
    if (function == NULL || !is_loaded((enum call_id)atomic_load(&followed_call[family]), function)) {
        atomic_store(&followed_call[family], (int)id);
        atomic_store(&followed_function[family], found);
        return true;
    }
    return loaded_beside(function, call_name(id)) == found;
}

bool nccl_survey(void)
{
    unsigned long long changes = loaded_changes();
    if (changes == 0 || changes != atomic_load(&surveyed)) {
        forget_unloaded_functions();
        atomic_store(&has_several_nccl, loaded_twice(IN_EVERY_NCCL));
        atomic_store(&surveyed, changes);
    }
    return atomic_load(&has_several_nccl);
}

const void *nccl_library_of(const void *function)
{
    const void *found = loaded_beside(function, IN_EVERY_NCCL);
    if (found != NULL) return found;
    /* The function of another preload that wraps this call alone: with one NCCL there is no doubt what is behind it. */
    return atomic_load(&has_several_nccl) ? NULL : loaded_last(IN_EVERY_NCCL);
}

void *nccl_function_in(enum call_id id, const void *library)
{
    for (int n = 0; n < CACHED_LIBRARIES; n++) {
        const void *holder = NULL;
        if (!atomic_compare_exchange_strong(&cache[n].library, &holder, library) && holder != library) continue;
        void *function = atomic_load(&cache[n].functions[id]);
        if (function != NULL) return function;
        function = loaded_beside(library, call_name(id));
        atomic_store(&cache[n].functions[id], function);
        return function;
    }
    return loaded_beside(library, call_name(id));
}

/* Who names a library as needed was led to us by the linker; everybody else holds a wrapper that a lookup gave. */
void *nccl_function_for(enum call_id id, const void *caller)
{
    void *needed = loaded_for(caller, call_name(id));
    return needed != NULL ? needed : function_asked_for(id);
}
