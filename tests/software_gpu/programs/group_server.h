/* Mode server of `ring`: rank 0 holds parameters, the others read them in its memory, and write what is to be added into it.
 *
 * One object has many importers, and the workers' kernels wait on a word of another process's memory.
 */
#ifndef GROUP_SERVER_H
#define GROUP_SERVER_H

#include "group_share.h"

struct server_group {
    struct rank rank;
    word words;
    struct shared params; /* [words of parameters][words of each worker][flags] */
    CUdeviceptr state, copy, total;
    word *base, *given, total_wanted; /* base: parameters at step 0; given: what all workers together add in step 0 */
};

static CUdeviceptr params_of(const struct server_group *group, int number) { return group->params.address + (word)number * group->words * 8; }
static CUdeviceptr params_flag(const struct server_group *group, int number)
{
    return params_of(group, (int)group->rank.options->ranks) + (word)number * 8;
}

static struct server_group server_open(const struct options *options, int number)
{
    struct server_group group = {.rank = rank_open(options, number), .words = (word)options->mib * MIB / 8};
    struct rank *rank = &group.rank;
    group.state = allocate(group.words * 8);
    group.copy = allocate(group.words * 8);
    group.total = allocate(8);
    rank->steps = allocate(8);
    rank->host = allocate_host(group.words * 8);
    group.base = malloc(group.words * 8);
    group.given = calloc(group.words, 8);
    for (word n = 0; n < group.words; n++) {
        group.base[n] = fill_of(rank, 0, n);
        for (int worker = 1; worker < options->ranks; worker++) group.given[n] += fill_of(rank, worker, n);
    }
    launch(rank->fill, rank->stream, group.state, group.words, seed_of(rank, number));
    return group;
}

static void server_connect(struct server_group *group)
{
    const struct rank *rank = &group->rank;
    long ranks = rank->options->ranks;
    if (rank->number > 0) group->params = shared_take(rank, 0);
    else {
        group->params = shared_make(rank, (word)ranks * group->words * 8 + 64 * 8);
        launch(rank->fill, rank->stream, group->params.address, group->words, seed_of(rank, 0));
        CHECK(cuStreamSynchronize(rank->stream));
        for (int worker = 1; worker < ranks; worker++) shared_offer(rank, &group->params, worker);
    }
    mesh_close(rank->number);
}

static void launch_server(struct server_group *group)
{
    const struct rank *rank = &group->rank;
    launch(rank->increment, rank->stream, rank->steps, 1, 1);
    for (int worker = 1; worker < rank->options->ranks; worker++) launch_one(rank->wait, rank->stream, params_flag(group, worker), rank->steps, 0);
    for (int worker = 1; worker < rank->options->ranks; worker++) launch(rank->add, rank->stream, params_of(group, 0), group->words, params_of(group, worker));
    CHECK(cuMemcpyDtoDAsync_v2(group->copy, params_of(group, 0), group->words * 8, rank->stream));
    launch_one(rank->post, rank->stream, params_flag(group, 0), rank->steps, 0);
}

static void launch_worker(struct server_group *group)
{
    const struct rank *rank = &group->rank;
    launch(rank->increment, rank->stream, rank->steps, 1, 1);
    launch(rank->increment, rank->stream, group->state, group->words, 1);
    launch_one(rank->wait, rank->stream, params_flag(group, 0), rank->steps, (word)-1);
    CHECK(cuMemcpyDtoDAsync_v2(group->copy, params_of(group, 0), group->words * 8, rank->stream));
    CHECK(cuMemcpyDtoDAsync_v2(params_of(group, rank->number), group->state, group->words * 8, rank->stream));
    launch_one(rank->post, rank->stream, params_flag(group, rank->number), rank->steps, 0);
}

/* The parameters after `done` steps: in step t each worker adds its words plus t. */
static void check_params(struct server_group *group, word step, word done)
{
    const struct rank *rank = &group->rank;
    word counted = (word)(rank->options->ranks - 1) * (done * (done + 1) / 2), sum = 0;
    CHECK(cuMemcpyDtoHAsync_v2(rank->host, group->copy, group->words * 8, rank->stream));
    CHECK(cuStreamSynchronize(rank->stream));
    for (word n = 0; n < group->words; n++) {
        word wanted = group->base[n] + done * group->given[n] + counted;
        if (rank->host[n] != wanted) report_wrong(rank, step, "parameters", n, rank->host[n], wanted);
        sum += wanted;
    }
    write_step(rank, step, sum);
}

static void server_mode(const struct options *options, int number)
{
    struct server_group group = server_open(options, number);
    server_connect(&group);
    for (word step = 1; step <= (word)options->step_limit; step++) {
        stall(&group.rank, step);
        if (number == 0) launch_server(&group);
        else launch_worker(&group);
        check_params(&group, step, number == 0 ? step : step - 1);
        take_its_time(&group.rank, step);
    }
}

#endif
