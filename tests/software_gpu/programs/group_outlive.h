/* Mode outlive of `ring`: rank 0 gives its memory to all others and ends; they go on using it, each its own part. */
#ifndef GROUP_OUTLIVE_H
#define GROUP_OUTLIVE_H

#include "group_share.h"

static void outlive_exporter(struct rank *rank, word words)
{
    struct shared own = shared_make(rank, words * 8);
    launch(rank->fill, rank->stream, own.address, words, seed_of(rank, 0));
    CHECK(cuStreamSynchronize(rank->stream));
    for (int peer = 1; peer < rank->options->ranks; peer++) shared_offer(rank, &own, peer);
    for (int peer = 1; peer < rank->options->ranks; peer++) hear_number(rank, peer);
}

/* Part 0 is changed by nobody and looked at by all; part n is counted up by rank n. */
static void outlive_importer(struct rank *rank, word words)
{
    struct shared taken = shared_take(rank, 0);
    word part = words / (word)rank->options->ranks, first = part * (word)rank->number;
    word *base = malloc(words * 8);
    for (word n = 0; n < words; n++) base[n] = fill_of(rank, 0, n);
    rank->host = allocate_host(words * 8);
    tell_number(rank, 0, 0);
    mesh_close(rank->number);
    for (word step = 1; step <= (word)rank->options->step_limit; step++) {
        stall(rank, step);
        launch(rank->increment, rank->stream, taken.address + first * 8, part, 1);
        compare(rank, rank->stream, taken.address, (struct expected){base, 0}, 0, part, step);
        compare(rank, rank->stream, taken.address, (struct expected){base, step}, first, first + part, step);
        write_step(rank, step, step);
        take_its_time(rank, step);
    }
}

static void outlive_mode(const struct options *options, int number)
{
    struct rank rank = rank_open(options, number);
    word words = (word)options->mib * MIB / 8;
    if (number == 0) outlive_exporter(&rank, words);
    else outlive_importer(&rank, words);
}

#endif
