#include "intercept.h"

#include <stdatomic.h>

#include "elf_symbols.h"
#include "loaded_objects.h"

/* What stands in for a call that nobody defines: an application with a weak reference and no driver. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define DRIVER_CALL(result, name, parameters, missing) \
    static result missing_##name parameters \
    { \
        return missing; \
    }
#define LINKER_CALL DRIVER_CALL
#include "calls.def"
#undef DRIVER_CALL
#undef LINKER_CALL
#pragma GCC diagnostic pop

struct call {
    const char *name;
    void *wrapper;
    void *missing;
    bool in_linker;
};

#define ROW(name, in_linker) {#name, (void *)wrap_##name, (void *)missing_##name, in_linker},
static const struct call calls[CALL_COUNT] = {
#define DRIVER_CALL(result, name, parameters, missing) ROW(name, false)
#define LINKER_CALL(result, name, parameters, missing) ROW(name, true)
#include "calls.def"
#undef DRIVER_CALL
#undef LINKER_CALL
};

/* What lookups have given: to applications, and to interposers that sit between us and the driver. */
static _Atomic(void *) asked_by_application[CALL_COUNT];
static _Atomic(void *) asked_by_interposer[CALL_COUNT];
static _Atomic(void *) linker_functions[CALL_COUNT];

/* An interposer behind us may hold our wrapper as its "real" function. Then we are entered a second time in the same
 * thread, and must go to the bottom of the chain instead of to the interposer again. */
static _Thread_local unsigned char depth[CALL_COUNT];

enum call_id call_named(const char *name)
{
    if (name == NULL || (name[0] != 'c' && name[0] != 'd')) return CALL_NONE;
    for (enum call_id id = 0; id < CALL_COUNT; id++)
        if (same_name(calls[id].name, name)) return id;
    return CALL_NONE;
}

static void *outer_function(enum call_id id)
{
    void *function = atomic_load(&asked_by_application[id]);
    if (function == NULL) function = loaded_next(calls[id].name);
    if (function == NULL) function = atomic_load(&asked_by_interposer[id]);
    return function;
}

static void *bottom_function(enum call_id id)
{
    void *function = atomic_load(&asked_by_interposer[id]);
    if (function == NULL) function = atomic_load(&asked_by_application[id]);
    if (function == NULL) function = loaded_last(calls[id].name);
    return function;
}

void *function_behind(enum call_id id)
{
    void *function = depth[id] == 0 ? outer_function(id) : bottom_function(id);
    return function != NULL ? function : calls[id].missing;
}

struct passage passage_enter(enum call_id id)
{
    struct passage passage = {.id = id, .function = function_behind(id)};
    depth[id]++;
    return passage;
}

void passage_leave(struct passage *passage)
{
    depth[passage->id]--;
}

void *linker_function(enum call_id id)
{
    void *function = atomic_load(&linker_functions[id]);
    if (function != NULL) return function;
    function = linked_next(calls[id].name);
    if (function == NULL) return calls[id].missing;
    atomic_store(&linker_functions[id], function);
    return function;
}

bool is_linker_call(enum call_id id)
{
    return calls[id].in_linker;
}

bool defined_by_asker(enum call_id id, const void *asker)
{
    return loaded_beside(asker, calls[id].name) != NULL;
}

bool defined_elsewhere(enum call_id id)
{
    return loaded_first(calls[id].name) != NULL;
}

bool is_ours(enum call_id id, const void *function)
{
    return function == calls[id].wrapper;
}

void *substitute(enum call_id id, void *found, bool asker_is_interposer)
{
    if (is_ours(id, found)) return found;
    if (asker_is_interposer)
        atomic_store(&asked_by_interposer[id], found);
    else if (!calls[id].in_linker)
        atomic_store(&asked_by_application[id], found);
    return calls[id].wrapper;
}

void substitute_proc_address(const char *symbol, int cuda_version, void **function)
{
    enum call_id id = call_named(symbol);
    if (id == CALL_NONE || calls[id].in_linker || function == NULL || *function == NULL) return;
    if (id == CALL_cuGetProcAddress && cuda_version >= CUDA_VERSION_OF_PROC_ADDRESS_V2) id = CALL_cuGetProcAddress_v2;
    *function = substitute(id, *function, false);
}
