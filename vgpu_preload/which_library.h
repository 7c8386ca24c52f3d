/* Which of several loaded NCCLs or NVSHMEMs a call belongs to.
 *
 * One process may load two (a framework brings its own, a wheel another one), and a communicator may only be given to
 * the library that made it. Our exported symbol catches the callers of all, so a call is passed on by its communicator,
 * and without one by its caller. With one library loaded none of this is asked: one flag is read.
 */
#ifndef VGPU_WHICH_LIBRARY_H
#define VGPU_WHICH_LIBRARY_H

#include "intercept.h"

/* False: an application looks a function up in another library than the one whose lookups we answer. It then gets the
 * function itself, because a wrapper could not tell afterwards which of the two was meant. */
bool library_is_followed(enum call_id id, void *found);

/* True while more than one NCCL is known to be loaded. */
extern _Atomic(bool) has_several_nccl;

/* Looks whether there are several; cheap when nothing was loaded since. */
bool nccl_survey(void);

/* What stands for the library that `function` is of. */
const void *nccl_library_of(const void *function);

/* The function of `id` in this library; NULL: it has none. */
void *nccl_function_in(enum call_id id, const void *library);

/* The function of `id` that `caller` would have reached without us; NULL: as with one library. Only with several. */
void *nccl_function_for(enum call_id id, const void *caller);

#endif
