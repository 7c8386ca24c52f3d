/* The NCCL communicators of this process: which there are, and how many calls were made on each.
 *
 * A fixed table in memory of our own. A call on a communicator finds its entry without a lock and adds one to a counter;
 * entries come and go under a lock that is never held across a call of NCCL. What does not fit is counted as unlisted
 * and works as without us. Asks nothing of NCCL itself: nccl_calls.h does.
 */
#ifndef VGPU_COMMUNICATORS_H
#define VGPU_COMMUNICATORS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_COMMUNICATORS 1024
#define COMMUNICATOR_PLACES 4096U /* a quarter full at most, so that the few next places always hold what is looked for */
#define COMMUNICATOR_PROBES 64U
#define COMMUNICATOR_ID_SIZE 16

/* The same in every rank of one communicator (spec/preload-protocol.md, COMMUNICATORS). */
struct communicator_id {
    unsigned char bytes[COMMUNICATOR_ID_SIZE];
};

struct communicator_facts {
    struct communicator_id id, parent;
    bool has_parent;
    bool has_split;
    int color, key; /* of the split */
    int rank, size, device, version;
    bool is_known; /* NCCL has said rank, size, device and version */
};

/* Two lines of the cache: communicators of different threads do not meet on one. */
struct communicator {
    _Atomic(const void *) handle; /* NULL: never used */
    _Atomic(uint64_t) collectives, point_to_point;
    _Atomic(uint32_t) splits, shrinks;
    _Atomic(bool) is_known, is_finalized;
    _Atomic(unsigned int) tries; /* to learn it */
    const void *library; /* see which_library.h */
    int wanted_size;     /* 0: NCCL alone knows */
    struct communicator_facts facts;
} __attribute__((aligned(128)));

extern struct communicator communicator_table[COMMUNICATOR_PLACES];

static inline unsigned int communicator_place(const void *handle)
{
    return (unsigned int)(((uint64_t)(uintptr_t)handle >> 4) * 0x9e3779b97f4a7c15ULL >> 40) % COMMUNICATOR_PLACES;
}

static inline struct communicator *communicator_find(const void *handle)
{
    unsigned int place = communicator_place(handle);
    if (handle == NULL) return NULL;
    for (unsigned int n = 0; n < COMMUNICATOR_PROBES; n++, place = (place + 1) % COMMUNICATOR_PLACES) {
        struct communicator *entry = &communicator_table[place];
        const void *found = atomic_load_explicit(&entry->handle, memory_order_acquire);
        if (found == handle) return entry;
        if (found == NULL) return NULL;
    }
    return NULL;
}

/* NULL: there is no room, and it was counted as unlisted. An entry of this handle that is there already is replaced. */
struct communicator *communicator_add(const void *handle, const void *library, const struct communicator_facts *facts);

/* What NCCL said about one that is there; size 0 leaves it as it is. */
void communicator_learn(struct communicator *entry, int rank, int size, int device, int version);

/* Takes the entry out and gives what it held, to be put back when NCCL would not end the communicator. */
struct communicator_rest {
    const void *handle, *library;
    struct communicator_facts facts;
    uint64_t collectives, point_to_point;
    uint32_t splits, shrinks;
    bool is_finalized;
};
bool communicator_take(const void *handle, struct communicator_rest *rest);
void communicator_put_back(const struct communicator_rest *rest);

/* Steps through the table from `*place`, which moves behind what is found; false: there are no more. */
bool communicator_next(unsigned int *place, struct communicator_rest *rest);

/* Communicators that came to be and are not in the table. */
void communicators_note_unlisted(void);
unsigned long communicators_unlisted(void);

/* Ids: of the unique ids that a communicator was made with, of a child of a parent, and one that nobody else has. */
struct communicator_id communicator_id_of(const void *unique_ids, size_t size);
struct communicator_id communicator_id_of_split(const struct communicator_id *parent, int color, uint32_t split);
struct communicator_id communicator_id_of_shrink(const struct communicator_id *parent, int excluded, uint32_t shrink);
struct communicator_id communicator_id_of_its_own(void);

/* NCCL does not work in a forked child: it starts with none. */
void communicators_after_fork_in_child(void);

#endif
