/* This process's processing element of NVSHMEM and the teams that it made.
 *
 * Asked of NVSHMEM when it has been initialised and when a team was made, in the thread that did it; told to the agent
 * by communicators_answer.c. Its symmetric heap is not told: the host library has no call that says where it is.
 */
#ifndef VGPU_NVSHMEM_FACTS_H
#define VGPU_NVSHMEM_FACTS_H

#include <stdbool.h>

#include "library_abi.h"

#define MOST_TEAMS 256

struct nvshmem_team {
    nvshmem_team_t team, parent;
    int pe, size;
};

struct nvshmem_facts {
    bool is_there;
    int pe, size;
    int device; /* -1: not known */
    int major, minor, patch;
    unsigned int team_count;
    unsigned long unlisted; /* teams for which there was no room */
    struct nvshmem_team teams[MOST_TEAMS];
};

/* `function`: one of NVSHMEM's, beside which the others lie. */
void nvshmem_initialised(const void *function);
void nvshmem_finalised(const void *function);
void nvshmem_team_made(const void *function, nvshmem_team_t team, nvshmem_team_t parent);
void nvshmem_team_gone(nvshmem_team_t team);

/* A copy that nobody changes meanwhile; only the helper thread asks for it. */
const struct nvshmem_facts *nvshmem_facts(void);

void nvshmem_after_fork_in_child(void);

/* NVSHMEM calls its own exported functions; only a thread's outermost call counts. */
extern _Thread_local unsigned int nvshmem_depth;

static inline void nvshmem_leave(const bool *is_outermost)
{
    (void)is_outermost;
    nvshmem_depth--;
}

#define NVSHMEM_PASSAGE() __attribute__((cleanup(nvshmem_leave))) const bool is_outermost = nvshmem_depth++ == 0

#endif
