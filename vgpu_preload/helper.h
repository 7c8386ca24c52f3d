/* Starts the one thread that this library has, in a process that has just initialised CUDA. */
#ifndef VGPU_HELPER_H
#define VGPU_HELPER_H

/* Does nothing when this process has its helper already. Leaves errno as it was; never fails towards the caller: a
 * process that cannot have a helper goes on as if the library were not there. */
void helper_start(void);

#endif
