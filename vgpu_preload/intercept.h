/* How a call is intercepted: WRAP defines the wrapper, NEXT calls the function that would have been called without us.
 *
 * A file in calls/ looks like this, and nothing else is needed beside its line in calls.def:
 *
 *     WRAP(CUresult, cuMemRelease, (CUmemGenericAllocationHandle handle))
 *     {
 *         PASS_GATE();
 *         CUresult rc = NEXT(cuMemRelease, handle);
 *         if (rc == CUDA_SUCCESS) forget(handle);
 *         return rc;
 *     }
 *
 * No wrapper holds a lock across NEXT.
 */
#ifndef VGPU_INTERCEPT_H
#define VGPU_INTERCEPT_H

#include <features.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "cuda_abi.h"
#include "library_abi.h"

#ifdef __GLIBC__
#define VGPU_HAVE_DLVSYM 1
#else
#define VGPU_HAVE_DLVSYM 0 /* musl has no symbol versions to ask for */
#endif

#define EXPORTED __attribute__((visibility("default")))

#if defined(__clang__)
#define TAIL_CALL __attribute__((musttail))
#else
#define TAIL_CALL /* gcc -O2 makes the jump by itself; the RTLD_NEXT test of each build holds it to that */
#endif

enum call_id {
#define CALL(result, name, base, since, threads, parameters, missing) CALL_##name,
#define LINKER_CALL(result, name, parameters, missing) CALL_##name,
#include "calls.def"
#undef CALL
#undef LINKER_CALL
    CALL_COUNT,
    CALL_NONE = CALL_COUNT
};

/* The function type, the exported name and the wrapper behind it. The wrapper has a hidden name of its own, so that its
 * address is ours whatever the executable or another preload defines under the public one. */
#define LINKER_CALL(result, name, parameters, missing) \
    typedef result name##_function parameters; \
    EXPORTED result name parameters; \
    result wrap_##name parameters;
#define CALL(result, name, base, since, threads, parameters, missing) LINKER_CALL(result, name, parameters, missing)
#include "calls.def"
#undef CALL
#undef LINKER_CALL

#define WRAP(result, name, parameters) \
    EXPORTED result name parameters __attribute__((alias("wrap_" #name))); \
    result wrap_##name parameters

/* What NEXT would call now, for whoever needs its address. */
void *function_behind(enum call_id id);

/* What was found for calls that have been made, so that a kernel launch looks nothing up. Forgotten at each cuInit: a
 * driver library that was unloaded and loaded again has to be initialised again. */
extern _Atomic(void *) known_function[CALL_COUNT];
void *find_function(enum call_id id);
void forget_known_functions(void);

/* Forgets functions of NCCL and NVSHMEM that were found or asked for in a library that is gone. */
void forget_unloaded_functions(void);

/* An interposer behind us may hold our wrapper as its "real" function. Then we are entered a second time in the same
 * thread, and must go to the bottom of the chain instead of to the interposer again. */
extern _Thread_local unsigned char call_depth[CALL_COUNT];

/* One passage through a driver call in this thread; ends by itself at the end of NEXT. */
struct passage {
    enum call_id id;
    void *function;
};

static inline struct passage passage_enter(enum call_id id)
{
    void *function = call_depth[id] == 0 ? atomic_load_explicit(&known_function[id], memory_order_acquire) : NULL;
    struct passage passage = {.id = id, .function = function != NULL ? function : find_function(id)};
    call_depth[id]++;
    return passage;
}

static inline void passage_leave(struct passage *passage)
{
    call_depth[passage->id]--;
}

#define NEXT_WITH(name, arguments) \
    __extension__({ \
        __attribute__((cleanup(passage_leave))) struct passage passage = passage_enter(CALL_##name); \
        ((name##_function *)passage.function) arguments; \
    })
#define NEXT(name, ...) NEXT_WITH(name, (__VA_ARGS__))

/* The real linker call, to be jumped to: it may look at its return address to learn who asks. */
#define NEXT_IN_LINKER(name) ((name##_function *)linker_function(CALL_##name))
void *linker_function(enum call_id id);

/* Which intercepted call has this public name: CALL_NONE for every other name, and for NULL. */
enum call_id call_named(const char *name);

/* True when `asker`, a code address, lies in an object that defines this call itself: another interposer. */
bool defined_by_asker(enum call_id id, const void *asker);

/* True for dlsym and dlvsym. */
bool is_linker_call(enum call_id id);

/* True for calls of NCCL and of NVSHMEM, of which a process may have loaded more than one. */
bool is_nccl_call(enum call_id id);
bool is_library_call(enum call_id id);

/* The public name. */
const char *call_name(enum call_id id);

/* What a lookup of an application gave last for this call; NULL: none was made. */
void *function_asked_for(enum call_id id);

/* True when somebody else in the process defines it. */
bool defined_elsewhere(enum call_id id);

/* True when `function` is our wrapper, which is also the address of our exported symbol. */
bool is_ours(enum call_id id, const void *function);

/* Remembers that `found` is what the application was about to use and gives the wrapper to use instead. */
void *substitute(enum call_id id, void *found, bool asker_is_interposer);

/* The form of a driver call that cuGetProcAddress means: by name, by the CUDA version and the flags asked with. */
enum call_id call_asked_for(const char *base, int cuda_version, cuuint64_t flags);

/* The newest CUDA version whose forms the table knows. */
extern const int newest_cuda_in_table;

#endif
