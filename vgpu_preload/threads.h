/* Starts threads of ours in a program that may not have linked against a thread library. */
#ifndef VGPU_THREADS_H
#define VGPU_THREADS_H

#include <signal.h>
#include <stdbool.h>

/* Detached, all signals blocked, small stack. `application_mask` gets the caller's mask unless NULL. */
bool thread_start(void *(*main)(void *), sigset_t *application_mask);

#endif
