/* Runs one piece of work on a stream's worker thread. A device address is a host address, so copies are plain copies.
 *
 * Work that touches device memory which is not there any more sets the fault that every later call then returns (700), as a
 * real device does, instead of killing the process.
 */
#include <time.h>

#include "driver.h"

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static bool is_reachable(uint64_t address, size_t bytes, bool write)
{
    return memory_is_device(address, bytes, write) || memory_is_pageable_host(address);
}

static bool run_copy(const struct op *op)
{
    if (!is_reachable(op->dst, op->bytes, true) || (!op->staged && !is_reachable(op->src, op->bytes, false))) return false;
    memmove((void *)op->dst, op->staged ? op->staged : (void *)op->src, op->bytes); /* NOLINT: addresses are checked */
    return true;
}

static void set_row(uint64_t dst, unsigned value, unsigned width, size_t count)
{
    if (width == 1) memset((void *)dst, (int)value, count);
    else if (width == 2) for (size_t n = 0; n < count; n++) ((uint16_t *)dst)[n] = (uint16_t)value;
    else for (size_t n = 0; n < count; n++) ((uint32_t *)dst)[n] = value;
}

/* bytes counts elements of one row here. */
static bool run_set(const struct op *op)
{
    for (size_t row = 0; row < op->height; row++) {
        uint64_t dst = op->dst + row * op->pitch;
        if (!memory_is_device(dst, op->bytes * op->width, true)) return false;
        set_row(dst, op->value, op->width, op->bytes);
    }
    return true;
}

static void run_event(CUstream stream, const struct op *op)
{
    int64_t now = now_ns();
    pthread_mutex_lock(&work_lock);
    if (op->event->stream == stream && op->event->number == op->number) op->event->time_ns = now;
    pthread_mutex_unlock(&work_lock);
    if (op->shared) shared_event_reach(op->shared, op->shared_number);
}

static bool run_kernel(CUstream stream, struct op *op)
{
    op->args.context = stream->context;
    memory_act_for(stream->context->device);
    bool ok = op->kernel->run(&op->args);
    memory_act_for(-1);
    return ok;
}

/* After a kernel that gave up waiting nothing of its context may change memory that others see. */
static bool is_dropped(CUstream stream, const struct op *op)
{
    bool is_work = op->kind == OP_COPY || op->kind == OP_SET || op->kind == OP_KERNEL || op->kind == OP_HOST || op->kind == OP_CALLBACK;
    return is_work && __atomic_load_n(&stream->context->is_cut, __ATOMIC_ACQUIRE);
}

void op_execute(CUstream stream, struct op *op)
{
    bool ok = true;
    if (is_dropped(stream, op)) return;
    switch (op->kind) {
    case OP_COPY: ok = run_copy(op); break;
    case OP_SET: ok = run_set(op); break;
    case OP_KERNEL: ok = run_kernel(stream, op); break;
    case OP_HOST: op->host_fn(op->user); break;
    case OP_CALLBACK: op->callback(stream, CUDA_SUCCESS, op->user); break;
    case OP_EVENT: run_event(stream, op); break;
    case OP_GRAPH: graph_run(stream, op->exec); break;
    case OP_FREE: memory_free_address(op->dst); break;
    case OP_WAIT: break;
    }
    if (!ok) gate_set_fatal(CUDA_ERROR_ILLEGAL_ADDRESS);
}
