/* Mode pipeline of `ring`: stages send forward to the right and backward to the left, through each other's memory.
 *
 * Each stage has a stream and a thread for each direction. The backward thread waits on the host until the GPU has done the forward part
 * of a step, and only then launches the backward part; the forward thread may be two steps ahead of it.
 */
#ifndef GROUP_PIPELINE_H
#define GROUP_PIPELINE_H

#include "group_share.h"

#define DEPTH 2
enum { FORWARD_READY, BACKWARD_READY, FORWARD_ACK, BACKWARD_ACK, PIPELINE_FLAGS };

struct stage {
    struct rank rank;
    word words;
    struct shared own, left, right; /* [forward slot][backward slot][flags] */
    CUdeviceptr state, forward[DEPTH], backward, sums[2], back_steps;
    CUstream back;
    CUevent done[DEPTH];
    word *host_sums; /* of the forward part of DEPTH steps, then of the backward part */
    word *base, base_sum;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    word launched, finished; /* steps whose forward part is launched, whose backward part is done */
};

static bool is_first(const struct stage *stage) { return stage->rank.number == 0; }
static bool is_last(const struct stage *stage) { return stage->rank.number == stage->rank.options->ranks - 1; }
static CUdeviceptr stage_slot(const struct stage *stage, const struct shared *of, int backward) { return of->address + (word)backward * stage->words * 8; }
static CUdeviceptr stage_flag(const struct stage *stage, const struct shared *of, int number) { return stage_slot(stage, of, 2) + (word)number * 8; }

static void stage_open(struct stage *stage, const struct options *options, int number)
{
    struct rank *rank = &stage->rank;
    *rank = rank_open(options, number);
    stage->words = (word)options->mib * MIB / 8;
    size_t bytes = stage->words * 8;
    stage->state = allocate(bytes);
    for (int n = 0; n < DEPTH; n++) stage->forward[n] = allocate(bytes);
    stage->backward = allocate(bytes);
    for (int n = 0; n < 2; n++) stage->sums[n] = allocate(8);
    rank->steps = allocate(8);
    stage->back_steps = allocate(8);
    rank->host = allocate_host(bytes);
    stage->host_sums = allocate_host((DEPTH + 1) * 8);
    CHECK(cuStreamCreate(&stage->back, CU_STREAM_NON_BLOCKING));
    for (int n = 0; n < DEPTH; n++) CHECK(cuEventCreate(&stage->done[n], CU_EVENT_DISABLE_TIMING));
    launch(rank->fill, rank->stream, stage->state, stage->words, seed_of(rank, 0));
    stage->base = malloc(bytes);
    for (word n = 0; n < stage->words; n++) stage->base[n] = fill_of(rank, 0, n);
    stage->base_sum = sum_of(stage->base, stage->words);
    pthread_mutex_init(&stage->lock, NULL);
    pthread_cond_init(&stage->changed, NULL);
}

static void stage_connect(struct stage *stage)
{
    const struct rank *rank = &stage->rank;
    stage->own = shared_make(rank, 2 * stage->words * 8 + PIPELINE_FLAGS * 8);
    if (!is_first(stage)) shared_offer(rank, &stage->own, rank->number - 1);
    if (!is_last(stage)) shared_offer(rank, &stage->own, rank->number + 1);
    if (!is_first(stage)) stage->left = shared_take(rank, rank->number - 1);
    if (!is_last(stage)) stage->right = shared_take(rank, rank->number + 1);
    mesh_close(rank->number);
}

static void receive(const struct stage *stage, CUdeviceptr into, int backward)
{
    const struct rank *rank = &stage->rank;
    CUstream stream = backward ? stage->back : rank->stream;
    CUdeviceptr steps = backward ? stage->back_steps : rank->steps;
    const struct shared *sender = backward ? &stage->right : &stage->left;
    launch_one(rank->wait, stream, stage_flag(stage, &stage->own, FORWARD_READY + backward), steps, 0);
    CHECK(cuMemcpyDtoDAsync_v2(into, stage_slot(stage, &stage->own, backward), stage->words * 8, stream));
    launch_one(rank->post, stream, stage_flag(stage, sender, FORWARD_ACK + backward), steps, 0);
}

static void send_on(const struct stage *stage, CUdeviceptr from, int backward)
{
    const struct rank *rank = &stage->rank;
    CUstream stream = backward ? stage->back : rank->stream;
    CUdeviceptr steps = backward ? stage->back_steps : rank->steps;
    const struct shared *receiver = backward ? &stage->left : &stage->right;
    launch_one(rank->wait, stream, stage_flag(stage, &stage->own, FORWARD_ACK + backward), steps, (word)-1);
    CHECK(cuMemcpyDtoDAsync_v2(stage_slot(stage, receiver, backward), from, stage->words * 8, stream));
    launch_one(rank->post, stream, stage_flag(stage, receiver, FORWARD_READY + backward), steps, 0);
}

static void launch_forward(struct stage *stage, word step)
{
    const struct rank *rank = &stage->rank;
    CUdeviceptr content = stage->forward[step % DEPTH];
    launch(rank->increment, rank->stream, rank->steps, 1, 1);
    launch(rank->increment, rank->stream, stage->state, stage->words, 1);
    if (!is_first(stage)) receive(stage, content, 0);
    else CHECK(cuMemcpyDtoDAsync_v2(content, stage->state, stage->words * 8, rank->stream));
    launch(rank->increment, rank->stream, content, stage->words, (word)rank->number + 1);
    launch(rank->checksum, rank->stream, content, stage->words, stage->sums[0]);
    CHECK(cuMemcpyDtoHAsync_v2(&stage->host_sums[step % DEPTH], stage->sums[0], 8, rank->stream));
    if (!is_last(stage)) send_on(stage, content, 0);
    CHECK(cuEventRecord(stage->done[step % DEPTH], rank->stream));
}

static void launch_backward(struct stage *stage, word step)
{
    const struct rank *rank = &stage->rank;
    launch(rank->increment, stage->back, stage->back_steps, 1, 1);
    if (!is_last(stage)) receive(stage, stage->backward, 1);
    else CHECK(cuMemcpyDtoDAsync_v2(stage->backward, stage->forward[step % DEPTH], stage->words * 8, stage->back));
    launch(rank->increment, stage->back, stage->backward, stage->words, (word)rank->number + 1);
    launch(rank->checksum, stage->back, stage->backward, stage->words, stage->sums[1]);
    CHECK(cuMemcpyDtoHAsync_v2(&stage->host_sums[DEPTH], stage->sums[1], 8, stage->back));
    if (!is_first(stage)) send_on(stage, stage->backward, 1);
}

static word wait_for(struct stage *stage, const word *count, word least)
{
    pthread_mutex_lock(&stage->lock);
    while (*count < least) pthread_cond_wait(&stage->changed, &stage->lock);
    word seen = *count;
    pthread_mutex_unlock(&stage->lock);
    return seen;
}

static void count_to(struct stage *stage, word *count, word step)
{
    pthread_mutex_lock(&stage->lock);
    *count = step;
    pthread_cond_broadcast(&stage->changed);
    pthread_mutex_unlock(&stage->lock);
}

/* Stage n adds n + 1 on the way to the right, and again on the way back. */
static word added(int first, int last)
{
    word sum = 0;
    for (int n = first; n <= last; n++) sum += (word)n + 1;
    return sum;
}

static void *backward_thread(void *argument)
{
    struct stage *stage = argument;
    const struct rank *rank = &stage->rank;
    int last = (int)rank->options->ranks - 1;
    word forward_wanted = 0, backward_wanted = 0;
    CHECK(cuCtxSetCurrent(rank->context));
    for (word step = 1; step <= (word)rank->options->step_limit; step++) {
        word forward = step + added(0, rank->number), backward = step + added(0, last) + added(rank->number, last);
        wait_for(stage, &stage->launched, step);
        CHECK(cuEventSynchronize(stage->done[step % DEPTH]));
        compare_sum(rank, step, stage->host_sums[step % DEPTH], forward_wanted += stage->base_sum + stage->words * forward);
        launch_backward(stage, step);
        compare(rank, stage->back, stage->backward, (struct expected){stage->base, backward}, 0, stage->words, step);
        compare_sum(rank, step, stage->host_sums[DEPTH], backward_wanted += stage->base_sum + stage->words * backward);
        write_step(rank, step, backward_wanted);
        count_to(stage, &stage->finished, step);
    }
    return NULL;
}

static void pipeline_mode(const struct options *options, int number)
{
    static struct stage stage;
    pthread_t thread;
    stage_open(&stage, options, number);
    stage_connect(&stage);
    if (pthread_create(&thread, NULL, backward_thread, &stage) != 0) fail(2, "no thread\n");
    for (word step = 1; step <= (word)options->step_limit; step++) {
        if (step > DEPTH) wait_for(&stage, &stage.finished, step - DEPTH);
        stall(&stage.rank, step);
        launch_forward(&stage, step);
        count_to(&stage, &stage.launched, step);
        take_its_time(&stage.rank, step);
    }
    pthread_join(thread, NULL);
}

#endif
