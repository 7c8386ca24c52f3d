/* What the topics of the software driver share. One mutex per concern, never two held at once except driver_lock -> work_lock.
 *
 *   gate_*    gate.c        who may enter a call; closed while the process is locked
 *   device_*  device.c      devices of this process and their memory accounting
 *   context_* context.c     contexts, the per-thread stack
 *   stream_*  stream.c      ordered work, one worker thread per stream
 *   memory_*  memory.c      address ranges; a device pointer is also a host address
 *   vmm_*     vmm.c         physical memory behind handles; vmm_share.c: by descriptor
 *   module_*  module.c      functions by name
 *   save_*    save.c        moving device memory out and back
 *   shared_event_*  shared_event.c  interprocess events
 */
#ifndef DRIVER_H
#define DRIVER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "software_cuda.h"
#include "state_file.h"

#define EXPORT __attribute__((visibility("default")))
#define PAGE 4096ull
#define GRANULARITY (2ull << 20)
#define ROUND_UP(value, to) (((value) + (to) - 1) / (to) * (to))

/* Defines the exported call NAME: through the gate, then the body that follows. */
#define API(name, params, args)           \
    static CUresult name##_body params;   \
    EXPORT CUresult name params           \
    {                                     \
        CUresult rc = gate_enter();       \
        if (rc != CUDA_SUCCESS) return rc; \
        rc = name##_body args;            \
        gate_leave();                     \
        return rc;                        \
    }                                     \
    static CUresult name##_body params

/* An exported call that this driver refuses. */
#define REFUSED(name, params, code)  \
    EXPORT CUresult name params      \
    {                                \
        CUresult rc = gate_enter();  \
        if (rc != CUDA_SUCCESS) return rc; \
        gate_leave();                \
        return code;                 \
    }

#define NEED(condition, code) \
    do { if (!(condition)) return (code); } while (0)
#define TRY(call) \
    do { CUresult tried = (call); if (tried != CUDA_SUCCESS) return tried; } while (0)

/* gate.c */
CUresult gate_enter(void);
void gate_leave(void);
void gate_open_for_business(void);
bool gate_is_initialised(void);
void gate_mark_forked(void);
bool gate_is_forked(void);
void gate_close(void);
void gate_reopen(void);
bool gate_is_quiet(void);
void gate_mark_worker_thread(void);
void gate_set_fatal(CUresult code);

/* device.c */
struct device {
    uint8_t uuid[16];
    uint64_t memory_bytes, used_bytes;
    int state_fd, slot, node_fd;
    int state_ordinal; /* which gpuN file it is bound to; changes when restored on another device */
    bool is_in_use;    /* has had a context: counts as checkpointed */
    bool is_lost;      /* no device was left for it at restore */
};
extern struct device devices[MAX_DEVICES];
extern int device_count;
CUresult device_open_all(void);
CUresult device_claim(int ordinal);
void device_close_all(void);
bool device_is_any_open(void);
CUresult device_reserve(int ordinal, uint64_t bytes);
void device_give_back(int ordinal, uint64_t bytes);
bool device_is_valid(int ordinal);
CUresult device_rebind(const CUcheckpointGpuPair *pairs, unsigned count);

/* context.c */
struct stream;
struct CUctx_st {
    uint64_t magic;
    int device;
    unsigned flags;
    unsigned long long id;
    bool is_primary;
    bool is_ending; /* its waiting kernels give up */
    bool is_cut;    /* one did: what comes after it is not done */
    struct CUstream_st *default_stream;
    struct CUctx_st *next;
};
CUcontext context_current(void);
bool context_is_valid(CUcontext context);

/* stream.c: the only lock of streams, events and captures */
struct shared_event;
enum op_kind { OP_COPY, OP_SET, OP_KERNEL, OP_HOST, OP_CALLBACK, OP_EVENT, OP_WAIT, OP_GRAPH, OP_FREE };
struct kernel;
struct kernel_args { uint64_t value[8], blocks; CUcontext context; };
struct dependency { CUstream stream; uint64_t number; };
struct op {
    struct op *next;
    enum op_kind kind;
    uint64_t number;
    uint64_t dst, src;
    size_t bytes, pitch, height;
    unsigned value, width;
    void *staged; /* snapshot of pageable host memory, owned */
    const struct kernel *kernel;
    struct kernel_args args;
    CUhostFn host_fn;
    CUstreamCallback callback;
    void *user;
    CUevent event;
    CUgraphExec exec;
    struct dependency *waits;
    int wait_count;
    struct shared_event *shared; /* OP_EVENT: reaches shared_number; OP_WAIT: waits for it */
    uint64_t shared_number;
};
struct CUstream_st {
    uint64_t magic;
    CUcontext context; /* NULL while retired */
    unsigned flags;
    int priority;
    uint64_t id, submitted, completed;
    struct op *first, *last;
    bool has_worker, is_default;
    pthread_cond_t wake;
    struct capture *capture;
    struct CUstream_st *next;
};
struct CUevent_st {
    uint64_t magic;
    unsigned flags;
    CUstream stream; /* where it was last recorded */
    uint64_t number;
    int64_t time_ns;
    struct capture *capture;
    struct shared_event *shared; /* of an interprocess event, made here or opened; stays mapped, a stream may wait for it */
    int shared_file;             /* its number where it was made here, else -1 */
    struct CUevent_st *next;
};
/* event.c; `shared` and its file's number of an interprocess event, else NULL and -1 */
bool event_is_valid(CUevent event);
CUresult event_new(CUevent *out, unsigned flags, struct shared_event *shared, int shared_file);
extern pthread_mutex_t work_lock;
extern pthread_cond_t work_progress;
void stream_await_others(void); /* with work_lock held: a little, because other processes wake nobody here */
CUresult stream_resolve(CUstream handle, CUstream *out);
CUresult stream_open(CUcontext context, unsigned flags, int priority, bool is_default, CUstream *out);
void stream_retire_all(CUcontext context);
/* Takes the op's content; recorded instead of run while the stream captures. wait: until it is done (never while capturing). */
CUresult stream_submit(CUstream stream, struct op op, bool wait);
CUresult stream_submit_locked(CUstream stream, struct op op, uint64_t *number);
void stream_wait_context(CUcontext context);
bool stream_all_idle(void);
void stream_leave_capture(struct capture *capture); /* with work_lock held */
CUresult stream_refuse_capturing(CUstream stream);
void op_execute(CUstream stream, struct op *op);

/* graph.c */
struct capture;
CUresult graph_record(struct capture *capture, struct op op);
void graph_run(CUstream stream, CUgraphExec exec);
void capture_invalidate(struct capture *capture);

/* memory.c */
enum range_kind { RANGE_DEVICE, RANGE_MANAGED, RANGE_HOST, RANGE_REGISTERED, RANGE_MAPPED, RANGE_OPENED };
struct physical;
struct ipc_name { int pid; uint64_t buffer_id; };
struct range {
    uint64_t base;
    size_t size, span;
    enum range_kind kind;
    int device, access;
    unsigned flags;
    CUcontext context;
    uint64_t buffer_id;
    struct physical *physical; /* RANGE_MAPPED */
    size_t offset;                          /* RANGE_DEVICE: in the arena */
    bool is_offerable;                      /* RANGE_DEVICE: cuIpcGetMemHandle takes it */
    int ipc_slot;                           /* RANGE_DEVICE: its place in the arena's table, -1: none */
    struct ipc_name opened;                 /* RANGE_OPENED */
    int references;                         /* RANGE_OPENED */
    unsigned char peer_access[MAX_DEVICES]; /* RANGE_MAPPED: what cuMemSetAccess gave other devices */
    void *saved;                            /* content while checkpointed */
};
extern pthread_mutex_t driver_lock;
extern struct range **ranges;
extern size_t range_count;
struct range *range_find(uint64_t address);
CUresult range_add(struct range range);
void range_remove(struct range *range);
CUresult memory_allocate(CUcontext context, size_t bytes, bool is_offerable, uint64_t *address);
void memory_free_address(uint64_t address);
void memory_free_context(CUcontext context);
bool memory_is_device(uint64_t address, size_t bytes, bool write);
bool memory_load_word(uint64_t address, uint64_t *word);
int range_access(const struct range *range); /* of all devices together */
/* What this thread touches from now on is touched by a kernel of that device; -1: by anybody. */
void memory_act_for(int device);
bool memory_is_pageable_host(uint64_t address);
int memory_new_memfd(int device, size_t bytes);
/* The memfd of this process's allocations on a device; -1: none can be made. It begins with a table of offered allocations. */
#define ARENA_TABLE_BYTES (64ull << 10)
int memory_arena(int device);
void memory_close_arenas(void);

/* ipc.c, with driver_lock held */
void ipc_withdraw(struct range *range);
bool ipc_has_opened(void);

/* shared_event.c: what the processes that share an event see of it. All words only grow. */
struct shared_event { uint64_t magic, recorded, reached; };
struct shared_event *shared_event_make(int *number);
void shared_event_end(int number);
void shared_event_reach(struct shared_event *shared, uint64_t recorded);

/* vmm.c */
struct physical {
    uint64_t magic;
    size_t bytes;
    int device, fd, references, handle_types;
    bool is_imported;
    bool is_host; /* memory of the host, of no device; a process with it is not restored (measured) */
    void *saved;
    struct physical *next;
};
extern struct physical *all_physical;
#define HOST_MEMORY_NAME "software-gpu-host"
struct physical *vmm_from_handle(CUmemGenericAllocationHandle handle); /* with driver_lock held, as the next */
CUresult vmm_keep(struct physical content, CUmemGenericAllocationHandle *out);
bool vmm_has_imports(void);
bool vmm_has_host(void); /* of this process's own */
bool vmm_is_reserved(uint64_t address); /* with driver_lock held */

/* vmm_share.c */
int vmm_device_of_fd(int fd); /* -1: not of a device of ours */

/* module.c and kernels.c */
struct kernel {
    const char *name;
    int parameters;
    unsigned char size[8];
    bool (*run)(const struct kernel_args *args); /* false: touched memory that is not there */
};
const struct kernel *kernel_by_name(const char *name, size_t length);
void module_free_context(CUcontext context);

/* blake3.c */
bool blake3_chunks(const struct kernel_args *args);
bool blake3_chunks_copy(const struct kernel_args *args);

/* save.c */
CUresult save_memory(void);
CUresult restore_memory(const CUcheckpointGpuPair *pairs, unsigned count);
bool save_has_managed(void);

/* control.c */
CUresult control_start(void);

#endif
