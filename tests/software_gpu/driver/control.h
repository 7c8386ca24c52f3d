/* The control block: how another process steers this one through lock, checkpoint, restore and unlock.
 *
 * It lies in libcuda's writable data. The caller finds it by its magic in the target's libcuda.so mappings and reads and writes
 * it with process_vm_readv/writev. No descriptor, socket or shared mapping: CRIU sees a plain process. Each request is written
 * first and announced by request_number; the driver thread of the target answers in answer_number. The question for the state has
 * numbers of its own, because it must not end the wait of a lock: whoever asks counts up, the thread repeats what it saw.
 */
#ifndef CONTROL_H
#define CONTROL_H

#include "software_cuda.h"
#include "state_file.h"

#define CONTROL_MAGIC_HEAD "SoftwareGPU"
#define CONTROL_MAGIC_TAIL "ctl"
#define CONTROL_MAGIC_SIZE 16
#define CONTROL_ALIGNMENT 64 /* so that the magic never straddles a page */
#define CONTROL_LAYOUT 2

enum control_command { COMMAND_NONE, COMMAND_LOCK, COMMAND_CHECKPOINT, COMMAND_RESTORE, COMMAND_UNLOCK };

struct control_request {
    uint32_t command;
    uint32_t timeout_ms;
    uint32_t pair_count;
    uint32_t reserved;
    CUcheckpointGpuPair pairs[MAX_DEVICES];
};

struct control_block {
    char magic[CONTROL_MAGIC_SIZE];
    uint32_t layout;
    uint32_t size;
    uint32_t initialised;
    int32_t state;        /* CUprocessState */
    int32_t ns_pid;
    int32_t ns_driver_tid;
    int32_t result;       /* CUresult of answer_number */
    uint32_t device_count;
    uint64_t used_bytes[MAX_DEVICES];
    struct control_request request;
    uint32_t request_number;
    uint32_t answer_number;
    uint32_t question_number;
    uint32_t told_number;
};

extern struct control_block software_gpu_control;

#endif
