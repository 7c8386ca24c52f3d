/* How a call of NCCL passes through us: which function is called, and what is learned from it.
 *
 *     WRAP(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))
 *     {
 *         NCCL_PASSAGE(ncclCommFinalize, comm);
 *         return NCCL_NEXT(ncclCommFinalize, (comm));
 *     }
 *
 * NCCL calls its own exported functions (ncclBcast calls ncclBroadcast), which leads back to us: only the outermost
 * call of a thread counts. Nothing waits at the gate, because the driver's calls inside do.
 */
#ifndef VGPU_NCCL_CALLS_H
#define VGPU_NCCL_CALLS_H

#include "communicators.h"
#include "intercept.h"

struct nccl_passage {
    struct passage inner;
    struct communicator *of; /* the communicator that the call is about, where it is in the table */
    bool is_outermost;
};

extern _Thread_local unsigned int nccl_depth;

/* For a call on a communicator; `comm` NULL: for one that makes a communicator from nothing. */
struct nccl_passage nccl_enter(enum call_id id, ncclComm_t comm, const void *caller);

/* For a call that names no communicator and comes often. */
struct nccl_passage nccl_enter_group(enum call_id id, const void *caller);

static inline void nccl_leave(struct nccl_passage *passage)
{
    passage_leave(&passage->inner);
    nccl_depth--;
}

#define NCCL_PASSAGE_BY(entry) __attribute__((cleanup(nccl_leave))) struct nccl_passage passage = entry
#define NCCL_PASSAGE(name, comm) NCCL_PASSAGE_BY(nccl_enter(CALL_##name, comm, __builtin_return_address(0)))
#define NCCL_NEXT(name, arguments) ((name##_function *)passage.inner.function) arguments

/* Before work is submitted to a communicator: asks NCCL what it is, where that is not known yet. */
void nccl_before_use(const struct nccl_passage *passage, ncclComm_t comm);

static inline bool nccl_is_done(ncclResult_t rc)
{
    return rc == ncclSuccess || rc == ncclInProgress;
}

/* A communicator that a call makes. NCCL writes its handle at `where`, at once or when a group or a wait has ended. */
struct nccl_birth {
    ncclComm_t *where;
    struct communicator_facts facts; /* rank and size: 0 where NCCL has yet to say them */
};

/* The call that makes it has returned `rc`. */
void nccl_born(const struct nccl_passage *passage, const struct nccl_birth *birth, ncclResult_t rc);

/* A child of `parent`, the communicator of the passage, which NCCL does not return before this. */
void nccl_child_born(const struct nccl_passage *passage, ncclComm_t parent, const struct nccl_birth *birth,
                     ncclResult_t rc);

/* The application has learned the state of a communicator: whatever waited for that is looked at. */
void nccl_state_is(ncclComm_t comm, ncclResult_t state);

/* Ends a communicator: what was known of it until NCCL has said whether it is gone. */
struct nccl_end {
    struct communicator_rest rest;
    bool was_there;
};
struct nccl_end nccl_end_begin(const struct nccl_passage *passage, ncclComm_t comm);
void nccl_end_done(const struct nccl_end *end, ncclResult_t rc);

/* This thread's groups. */
void nccl_group_started(void);
void nccl_group_ended(ncclResult_t rc);

/* Children that NCCL has not returned yet. */
unsigned long nccl_unborn(void);

void nccl_calls_after_fork_in_child(void);

#endif
