#include "intercept.h"

#include "elf_symbols.h"
#include "loaded_objects.h"
#include "which_library.h"

/* What stands in for a call that nobody defines: an application with a weak reference and no driver. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define LINKER_CALL(result, name, parameters, missing) \
    static result missing_##name parameters \
    { \
        return missing; \
    }
#define CALL(result, name, base, since, threads, parameters, missing) LINKER_CALL(result, name, parameters, missing)
#include "calls.def"
#undef CALL
#undef LINKER_CALL
#pragma GCC diagnostic pop

enum threads { LEGACY, PER_THREAD };

struct call {
    const char *name;
    const char *base; /* NULL: a call of the dynamic linker */
    int since;
    enum threads threads;
    void *wrapper;
    void *missing;
};

#define FUNCTIONS(name) (void *)wrap_##name, (void *)missing_##name
static const struct call calls[CALL_COUNT] = {
#define CALL(result, name, base, since, threads, parameters, missing) {#name, #base, since, threads, FUNCTIONS(name)},
#define LINKER_CALL(result, name, parameters, missing) {#name, NULL, 0, LEGACY, FUNCTIONS(name)},
#include "calls.def"
#undef CALL
#undef LINKER_CALL
};

const int newest_cuda_in_table = NEWEST_CUDA_IN_TABLE;

/* What lookups have given: to applications, and to interposers that sit between us and the driver. */
static _Atomic(void *) asked_by_application[CALL_COUNT];
static _Atomic(void *) asked_by_interposer[CALL_COUNT];
static _Atomic(void *) linker_functions[CALL_COUNT];

_Atomic(void *) known_function[CALL_COUNT];
_Thread_local unsigned char call_depth[CALL_COUNT];

enum call_id call_named(const char *name)
{
    if (name == NULL || (name[0] != 'c' && name[0] != 'd' && name[0] != 'n')) return CALL_NONE;
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
    void *function = call_depth[id] == 0 ? outer_function(id) : bottom_function(id);
    return function != NULL ? function : calls[id].missing;
}

void *find_function(enum call_id id)
{
    if (call_depth[id] > 0) return function_behind(id);
    void *function = outer_function(id);
    if (function == NULL) return calls[id].missing;
    atomic_store_explicit(&known_function[id], function, memory_order_release);
    return function;
}

void forget_known_functions(void)
{
    for (enum call_id id = 0; id < CALL_COUNT; id++)
        atomic_store_explicit(&known_function[id], NULL, memory_order_release);
}

static void forget_if_unloaded(_Atomic(void *) *function, const char *name)
{
    void *found = atomic_load(function);
    if (found != NULL && loaded_beside(found, name) != found) atomic_compare_exchange_strong(function, &found, NULL);
}

void forget_unloaded_functions(void)
{
    for (enum call_id id = 0; id < CALL_COUNT; id++) {
        if (!is_library_call(id)) continue;
        forget_if_unloaded(&asked_by_application[id], calls[id].name);
        forget_if_unloaded(&asked_by_interposer[id], calls[id].name);
        forget_if_unloaded(&known_function[id], calls[id].name);
    }
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
    return calls[id].base == NULL;
}

bool is_nccl_call(enum call_id id)
{
    return calls[id].name[0] == 'n' && calls[id].name[1] == 'c';
}

bool is_library_call(enum call_id id)
{
    return calls[id].name[0] == 'n';
}

const char *call_name(enum call_id id)
{
    return calls[id].name;
}

void *function_asked_for(enum call_id id)
{
    return atomic_load(&asked_by_application[id]);
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

static void remember_asked(enum call_id id, void *found)
{
    atomic_store(&asked_by_application[id], found);
    atomic_store(&known_function[id], found);
}

void *substitute(enum call_id id, void *found, bool asker_is_interposer)
{
    if (is_ours(id, found)) return found;
    if (is_library_call(id) && !asker_is_interposer && !library_is_followed(id, found)) return found;
    if (asker_is_interposer)
        atomic_store(&asked_by_interposer[id], found);
    else if (!is_linker_call(id))
        remember_asked(id, found);
    return calls[id].wrapper;
}

enum call_id call_asked_for(const char *base, int cuda_version, cuuint64_t flags)
{
    enum call_id best = CALL_NONE;
    bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    if (base == NULL || base[0] != 'c') return CALL_NONE;
    for (enum call_id id = 0; id < CALL_COUNT; id++) {
        const struct call *call = &calls[id];
        if (call->base == NULL || call->since > cuda_version || !same_name(call->base, base)) continue;
        if (call->threads == PER_THREAD && !per_thread) continue;
        if (best == CALL_NONE || call->threads > calls[best].threads ||
            (call->threads == calls[best].threads && call->since > calls[best].since))
            best = id;
    }
    return best;
}
