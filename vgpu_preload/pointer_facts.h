/* What an application may ask about a pointer into memory that we have backed: the answers of the plain driver. */
#ifndef VGPU_POINTER_FACTS_H
#define VGPU_POINTER_FACTS_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

struct pointer_facts {
    CUdeviceptr pointer;
    bool is_allocation;  /* cuMemAlloc memory, or such memory of another process; else the application's own VMM memory */
    bool can_be_offered; /* cuIpcGetMemHandle gives a handle for it */
    CUdeviceptr base;
    size_t requested;
    CUcontext context;
    int device;
    int asked_handle_types;
    uint64_t buffer_id;
};

/* False: not ours. Called with the gate passed and no lock held. */
bool pointer_facts_of(CUdeviceptr pointer, struct pointer_facts *facts);

/* ASK_DRIVER: its answer for VMM memory is the same; NOT_FOR_THIS: it has no such attribute. */
enum pointer_answer { ASK_DRIVER, ANSWERED, NOT_FOR_THIS };
enum pointer_answer pointer_answer(const struct pointer_facts *facts, CUpointer_attribute attribute, void *data);

#endif
