/* Modes ring, graph and guests of `ring`: a sum over all ranks in a ring, as collective libraries do it.
 *
 * Each rank has words of its own that count up by one each step, and copies them; the copies are summed over all ranks by sending
 * pieces to the right-hand neighbour's memory and waiting on the device for the left-hand one. All that orders the ranks is words
 * in device memory that hold step numbers. In mode graph a step is one captured graph; in mode guests the last rank is
 * a guest that comes for one epoch and leaves, another process each time, and the ring is made anew with and without it.
 */
#ifndef GROUP_RING_H
#define GROUP_RING_H

#include "group_share.h"

#define FLAGS 64
#define ACK (FLAGS - 1)
#define PROOFS 32 /* from here on a word for each rank, see shared_check */

struct ring {
    struct rank rank;
    int size, place, left_rank, right_rank; /* of the members */
    word words, chunk, joined; /* joined: the step before the first one of this rank */
    CUdeviceptr state, work, total;
    struct shared own, left, right;
    word *base, base_sum, total_wanted;
    CUgraphExec exec;
};

static size_t slots_bytes(const struct ring *ring) { return 2 * ring->words * 8; } /* 2 (n - 1) pieces of 1/n */
static CUdeviceptr slot(const struct ring *ring, const struct shared *shared, int hop) { return shared->address + (word)hop * ring->chunk * 8; }
static CUdeviceptr flag(const struct ring *ring, const struct shared *shared, int number) { return shared->address + slots_bytes(ring) + (word)number * 8; }
static CUdeviceptr piece(const struct ring *ring, int number) { return ring->work + (word)((number + 2 * ring->size) % ring->size) * ring->chunk * 8; }

static struct ring ring_open(const struct options *options, int number, word joined)
{
    struct ring ring = {.rank = rank_open(options, number), .joined = joined};
    ring.words = (word)options->mib * MIB / 8 / 840 * 840; /* in equal pieces for any number of ranks */
    ring.state = allocate(ring.words * 8);
    ring.work = allocate(ring.words * 8);
    ring.total = allocate(8);
    ring.rank.steps = allocate(8);
    write_word(ring.rank.steps, joined);
    ring.rank.host = allocate_host(ring.words * 8);
    ring.base = malloc(ring.words * 8);
    launch(ring.rank.fill, ring.rank.stream, ring.state, ring.words, seed_of(&ring.rank, number));
    ring.own = shared_make(&ring.rank, slots_bytes(&ring) + FLAGS * 8);
    return ring;
}

/* What was sent before this ring was made counts as done. */
static void set_flags(struct ring *ring, word step)
{
    word flags[FLAGS];
    for (int n = 0; n < FLAGS; n++) flags[n] = step;
    CHECK(cuMemcpyHtoD_v2(flag(ring, &ring->own, 0), flags, sizeof flags));
}

static void set_base(struct ring *ring)
{
    for (word n = 0; n < ring->words; n++) {
        ring->base[n] = 0;
        for (int member = 0; member < ring->size; member++) ring->base[n] += fill_of(&ring->rank, member, n);
    }
    ring->base_sum = sum_of(ring->base, ring->words);
}

static void await_neighbours(const struct ring *ring)
{
    tell_number(&ring->rank, ring->left_rank, 0);
    tell_number(&ring->rank, ring->right_rank, 0);
    hear_number(&ring->rank, ring->left_rank);
    hear_number(&ring->rank, ring->right_rank);
}

/* Members are the ranks 0 to size - 1. Two members are each other's left and right. */
static void ring_join(struct ring *ring, int size, word step)
{
    ring->size = size;
    ring->place = ring->rank.number;
    ring->left_rank = (ring->place + size - 1) % size;
    ring->right_rank = (ring->place + 1) % size;
    ring->chunk = ring->words / (word)size;
    set_base(ring);
    set_flags(ring, step);
    await_neighbours(ring); /* a descriptor must not lie in a socket until somebody comes for it */
    shared_offer(&ring->rank, &ring->own, ring->right_rank);
    if (size > 2) shared_offer(&ring->rank, &ring->own, ring->left_rank);
    ring->left = shared_take(&ring->rank, ring->left_rank);
    ring->right = size > 2 ? shared_take(&ring->rank, ring->right_rank) : ring->left;
}

/* An exporter must not go before its neighbours have let go of its memory. */
static void ring_leave(struct ring *ring)
{
    shared_drop(&ring->left);
    if (ring->size > 2) shared_drop(&ring->right);
    await_neighbours(ring);
}

static void launch_hop(struct ring *ring, int hop)
{
    const struct rank *rank = &ring->rank;
    bool is_sum = hop < ring->size - 1;
    int sent = is_sum ? ring->place - hop : ring->place + 1 - (hop - (ring->size - 1));
    CHECK(cuMemcpyDtoDAsync_v2(slot(ring, &ring->right, hop), piece(ring, sent), ring->chunk * 8, rank->stream));
    launch_one(rank->post, rank->stream, flag(ring, &ring->right, hop), rank->steps, 0);
    launch_one(rank->wait, rank->stream, flag(ring, &ring->own, hop), rank->steps, 0);
    if (is_sum) launch(rank->add, rank->stream, piece(ring, sent - 1), ring->chunk, slot(ring, &ring->own, hop));
    else CHECK(cuMemcpyDtoDAsync_v2(piece(ring, sent - 1), slot(ring, &ring->own, hop), ring->chunk * 8, rank->stream));
}

static void launch_step(struct ring *ring)
{
    const struct rank *rank = &ring->rank;
    launch(rank->increment, rank->stream, rank->steps, 1, 1);
    launch(rank->increment, rank->stream, ring->state, ring->words, 1);
    CHECK(cuMemcpyDtoDAsync_v2(ring->work, ring->state, ring->words * 8, rank->stream));
    launch_one(rank->wait, rank->stream, flag(ring, &ring->own, ACK), rank->steps, (word)-1);
    for (int hop = 0; hop < 2 * (ring->size - 1); hop++) launch_hop(ring, hop);
    launch_one(rank->post, rank->stream, flag(ring, &ring->left, ACK), rank->steps, 0);
    launch(rank->checksum, rank->stream, ring->work, ring->words, ring->total);
}

static void capture_step(struct ring *ring)
{
    CUgraph graph;
    CHECK(cuStreamBeginCapture_v2(ring->rank.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    launch_step(ring);
    CHECK(cuStreamEndCapture(ring->rank.stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&ring->exec, graph, 0));
    CHECK(cuGraphDestroy(graph));
}

/* The sums of all steps so far add up on the device, so that no step goes unseen where several are launched at once. */
static void check_steps(struct ring *ring, word step, word counted)
{
    const struct rank *rank = &ring->rank;
    CHECK(cuMemcpyDtoHAsync_v2(rank->host, ring->total, 8, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    word total = rank->host[0];
    compare_sum(rank, step, total, ring->total_wanted);
    bool is_full = step % (word)rank->options->check_all == 0;
    word part = step % 8, first = is_full ? 0 : ring->words * part / 8, last = is_full ? ring->words : ring->words * (part + 1) / 8;
    compare(rank, rank->stream, ring->work, (struct expected){ring->base, counted}, first, last, step);
    write_step(rank, step, total);
}

/* How far all members together have counted: who joined late has counted less. */
static word counted_by_all(const struct ring *ring, word step, word guest_joined)
{
    const struct options *options = ring->rank.options;
    word all = (word)ring->size * step;
    return !strcmp(options->mode, "guests") && ring->size == options->ranks ? all - guest_joined : all;
}

static void check_kept(struct ring *ring, word step)
{
    const struct rank *rank = &ring->rank;
    int number = PROOFS + rank->number;
    shared_check(rank, &ring->left, flag(ring, &ring->left, number) - ring->left.address, step);
    if (ring->size > 2) shared_check(rank, &ring->right, flag(ring, &ring->right, number) - ring->right.address, step);
}

/* Every other rank launches --ahead steps before it waits for them. */
static void ring_steps(struct ring *ring, word first, word last)
{
    const struct options *options = ring->rank.options;
    word ahead = ring->rank.number % 2 ? (word)options->ahead : 1;
    for (word step = first; step <= last; step++) {
        stall(&ring->rank, step);
        if (ring->exec) CHECK(cuGraphLaunch(ring->exec, ring->rank.stream));
        else launch_step(ring);
        ring->total_wanted += ring->base_sum + ring->words * counted_by_all(ring, step, first - 1);
        if (step % ahead == 0 || step == last) check_steps(ring, step, counted_by_all(ring, step, first - 1));
        if (options->hold && step % 4 == 0) check_kept(ring, step);
        take_its_time(&ring->rank, step);
    }
}

static void ring_mode(const struct options *options, int number)
{
    struct ring ring = ring_open(options, number, 0);
    ring_join(&ring, (int)options->ranks, 0);
    mesh_close(number);
    if (!strcmp(options->mode, "graph")) capture_step(&ring);
    ring_steps(&ring, 1, (word)options->step_limit);
}

/* Even epochs without the guest, odd ones with it; two are the least that stay. */
static void guests_mode(const struct options *options, int number)
{
    word length = (word)options->epoch;
    struct ring ring = ring_open(options, number, 0);
    for (word epoch = 0; epoch * length < (word)options->step_limit; epoch++) {
        ring_join(&ring, (int)options->ranks - (epoch % 2 ? 0 : 1), epoch * length);
        ring_steps(&ring, epoch * length + 1, (epoch + 1) * length);
        ring_leave(&ring);
    }
}

static void guest(const struct options *options, int number, word epoch)
{
    word length = (word)options->epoch;
    struct ring ring = ring_open(options, number, epoch * length);
    ring_join(&ring, (int)options->ranks, epoch * length);
    ring_steps(&ring, epoch * length + 1, (epoch + 1) * length);
    ring_leave(&ring);
    CHECK(cuDevicePrimaryCtxRelease_v2(ring.rank.device));
}

#endif
