/* Descriptors of device memory under numbers of the application's own: it keeps them to send them on, or has not yet
 * imported what it was sent.
 *
 * Which numbers these are the agent finds, because only kcmp tells, which a container may not call. While the memory is
 * away a placeholder is under each: the number stays taken, and the placeholder says by its token which object it stands
 * for, wherever the application sends it meanwhile. The helper thread's alone.
 */
#ifndef VGPU_APP_DESCRIPTORS_H
#define VGPU_APP_DESCRIPTORS_H

#include "staging_frames.h"

/* Of RELEASE: placeholders under the numbers that it names. A number under which is something else by now is left alone. */
struct fault put_placeholders(const struct request *request);

/* Of FDS: true when its descriptors are for numbers; each is now under its number, or closed. */
bool take_descriptors_for_numbers(const struct request *request);

#endif
