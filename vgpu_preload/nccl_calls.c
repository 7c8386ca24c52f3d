#define _GNU_SOURCE
#include "nccl_calls.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "loaded_objects.h"
#include "which_library.h"

#define MOST_BIRTHS 256
#define MOST_TRIES 64 /* a communicator that has not begun by then is left unknown, because asking costs */

_Thread_local unsigned int nccl_depth;
static _Thread_local unsigned int group_depth;

/* What has been asked for and is not there yet. */
struct waiting {
    struct nccl_birth birth;
    const void *library;
    const void *thread; /* whose group makes it; NULL: none */
    ncclComm_t parent;  /* which says when it is there; NULL: none */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct waiting waiting[MOST_BIRTHS];
static _Atomic(unsigned int) waiting_count;

static const void *this_thread(void)
{
    return &group_depth;
}

/* ---- which function --------------------------------------------------------------------------- */

static struct nccl_passage enter(enum call_id id, struct communicator *of, bool is_doubtful, const void *caller)
{
    struct nccl_passage passage = {.of = of, .is_outermost = nccl_depth++ == 0};
    bool is_first = call_depth[id] == 0;
    void *function = NULL;
    passage.inner = passage_enter(id);
    if (!is_doubtful || (of == NULL && !is_first)) return passage;
    function = of != NULL && of->library != NULL ? nccl_function_in(id, of->library) : nccl_function_for(id, caller);
    if (function != NULL) passage.inner.function = function;
    return passage;
}

static bool are_several(void)
{
    return __builtin_expect(atomic_load_explicit(&has_several_nccl, memory_order_relaxed), 0);
}

struct nccl_passage nccl_enter(enum call_id id, ncclComm_t comm, const void *caller)
{
    struct communicator *of = communicator_find(comm);
    return enter(id, of, of != NULL ? are_several() : nccl_survey(), caller);
}

struct nccl_passage nccl_enter_group(enum call_id id, const void *caller)
{
    return enter(id, NULL, are_several(), caller);
}

/* ---- what a communicator is ------------------------------------------------------------------- */

typedef ncclResult_t asks_for_integer(ncclComm_t comm, int *value);
typedef ncclResult_t asks_for_version(int *version);

static bool ask_for(const void *library, const char *name, ncclComm_t comm, int *value)
{
    asks_for_integer *function = (asks_for_integer *)loaded_beside(library, name);
    return function != NULL && function(comm, value) == ncclSuccess;
}

/* Only in a thread of the application that uses the communicator just now: NCCL wants its calls one after the other. */
static void ask(struct communicator *entry, ncclComm_t comm)
{
    const void *library = entry->library;
    int state = ncclInProgress, size = 0, rank = 0, device = 0, version = 0, wanted = entry->wanted_size;
    if (library == NULL || atomic_fetch_add(&entry->tries, 1) >= MOST_TRIES) return;
    asks_for_version *version_of = (asks_for_version *)loaded_beside(library, "ncclGetVersion");
    if (version_of == NULL || version_of(&version) != ncclSuccess) return;
    if (!ask_for(library, "ncclCommGetAsyncError", comm, &state) || state != ncclSuccess) return;
    if (!ask_for(library, "ncclCommCount", comm, &size) || size < 1 || (wanted != 0 && size != wanted)) return;
    if (!ask_for(library, "ncclCommUserRank", comm, &rank) || rank < 0 || rank >= size) return;
    if (!ask_for(library, "ncclCommCuDevice", comm, &device) || device < 0) return;
    communicator_learn(entry, rank, size, device, version);
}

void nccl_before_use(const struct nccl_passage *passage, ncclComm_t comm)
{
    struct communicator *of = passage->of;
    if (passage->is_outermost && of != NULL && !atomic_load_explicit(&of->is_known, memory_order_relaxed))
        ask(of, comm);
}

/* ---- births ----------------------------------------------------------------------------------- */

static void wait_for(const struct waiting *one)
{
    bool has_room = false;
    pthread_mutex_lock(&lock);
    for (unsigned int n = 0; !has_room && n < MOST_BIRTHS; n++) {
        has_room = waiting[n].birth.where == NULL;
        if (has_room) waiting[n] = *one;
    }
    atomic_fetch_add(&waiting_count, has_room);
    pthread_mutex_unlock(&lock);
    if (!has_room) communicators_note_unlisted();
}

/* Takes out one that waits for this thread's group or for this parent; starts at `*place`. */
static bool take_waiting(const void *thread, ncclComm_t parent, unsigned int *place, struct waiting *one)
{
    bool found = false;
    if (atomic_load(&waiting_count) == 0) return false;
    pthread_mutex_lock(&lock);
    for (; !found && *place < MOST_BIRTHS; ++*place) {
        *one = waiting[*place];
        if (one->birth.where == NULL) continue;
        found = thread != NULL ? one->thread == thread : one->thread == NULL && one->parent == parent;
        if (!found) continue;
        waiting[*place].birth.where = NULL;
        atomic_fetch_sub(&waiting_count, 1);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* By the kernel: an application that gave up on its communicator may have given the place back. */
static bool read_handle(ncclComm_t *where, ncclComm_t *handle)
{
    struct iovec to = {handle, sizeof *handle}, from = {where, sizeof *where};
    return syscall(SYS_process_vm_readv, getpid(), &to, 1UL, &from, 1UL, 0UL) == (long)sizeof *handle;
}

static void enter_table(const struct waiting *one, ncclComm_t handle)
{
    struct communicator *entry = communicator_add(handle, one->library, &one->birth.facts);
    if (entry != NULL) ask(entry, handle);
}

/* What a group made has just been written. A child that waits for its parent is written only when the parent is done, so
 * an empty place means: not yet. */
static void look_at(struct waiting *one)
{
    ncclComm_t handle = NULL;
    if (one->thread != NULL) handle = *one->birth.where;
    if (one->thread == NULL && !read_handle(one->birth.where, &handle)) {
        communicators_note_unlisted();
    } else if (handle != NULL) {
        enter_table(one, handle);
    } else if (one->parent != NULL) {
        one->thread = NULL;
        wait_for(one);
    }
}

static void look_at_waiting(const void *thread, ncclComm_t parent)
{
    struct waiting one;
    unsigned int place = 0;
    while (take_waiting(thread, parent, &place, &one)) look_at(&one);
}

static void drop_waiting(const void *thread, ncclComm_t parent)
{
    struct waiting one;
    unsigned int place = 0;
    while (take_waiting(thread, parent, &place, &one)) continue;
}

void nccl_child_born(const struct nccl_passage *passage, ncclComm_t parent, const struct nccl_birth *birth,
                     ncclResult_t rc)
{
    if (!passage->is_outermost || !nccl_is_done(rc) || birth->where == NULL) return;
    struct waiting one = {.birth = *birth,
                          .library = nccl_library_of(passage->inner.function),
                          .thread = group_depth > 0 ? this_thread() : NULL,
                          .parent = parent};
    if (one.thread == NULL && *birth->where != NULL)
        enter_table(&one, *birth->where);
    else if (one.thread != NULL || parent != NULL)
        wait_for(&one);
}

void nccl_born(const struct nccl_passage *passage, const struct nccl_birth *birth, ncclResult_t rc)
{
    nccl_child_born(passage, NULL, birth, rc);
}

void nccl_state_is(ncclComm_t comm, ncclResult_t state)
{
    struct communicator *entry = communicator_find(comm);
    if (state == ncclInProgress) return;
    if (state != ncclSuccess) {
        drop_waiting(NULL, comm);
        return;
    }
    if (entry != NULL && !atomic_load(&entry->is_known)) ask(entry, comm);
    look_at_waiting(NULL, comm);
}

/* ---- ends and groups -------------------------------------------------------------------------- */

/* Before NCCL is called: as soon as it has ended, another communicator may have the same handle. */
struct nccl_end nccl_end_begin(const struct nccl_passage *passage, ncclComm_t comm)
{
    struct nccl_end end = {.was_there = false};
    if (!passage->is_outermost) return end;
    if (comm != NULL) drop_waiting(NULL, comm);
    end.was_there = communicator_take(comm, &end.rest);
    return end;
}

void nccl_end_done(const struct nccl_end *end, ncclResult_t rc)
{
    if (end->was_there && !nccl_is_done(rc)) communicator_put_back(&end->rest);
}

void nccl_group_started(void)
{
    group_depth++;
}

void nccl_group_ended(ncclResult_t rc)
{
    if (group_depth > 0) group_depth--;
    if (group_depth > 0) return;
    if (nccl_is_done(rc))
        look_at_waiting(this_thread(), NULL);
    else
        drop_waiting(this_thread(), NULL);
}

unsigned long nccl_unborn(void)
{
    return atomic_load(&waiting_count);
}

void nccl_calls_after_fork_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    for (unsigned int n = 0; n < MOST_BIRTHS; n++)
        if (waiting[n].birth.where != NULL) waiting[n].birth.where = NULL;
    atomic_store(&waiting_count, 0);
}
