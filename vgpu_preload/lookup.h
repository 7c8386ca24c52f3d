/* The decisions that dlsym and dlvsym share. */
#ifndef VGPU_LOOKUP_H
#define VGPU_LOOKUP_H

#include "intercept.h"

enum lookup_route {
    LOOKUP_PASS,   /* jump to the real function: not our business, or its own answer is right */
    LOOKUP_ABSENT, /* only we define it: look behind us, which fails and sets dlerror as if we were not there */
    LOOKUP_ANSWER, /* call the real function and put the wrapper in place of what it finds */
};

enum lookup_route lookup_route(enum call_id id, const void *handle, const void *asker);

/* RTLD_NEXT, for LOOKUP_ABSENT; the same value in glibc and musl. */
#define BEHIND_US ((void *)-1L)

/* Keeps a call before it from becoming a jump: the real function must see this library as the one that asks. */
#define NOT_A_TAIL_CALL(result) __asm__ volatile("" : "+r"(result)::"memory")

#endif
