/* Which mode the runtime chose for this container: the text of /run/vgpu/mode. */
#ifndef VGPU_MODE_H
#define VGPU_MODE_H

#include <stdbool.h>

/* Fixed when the library is built, as the socket's path. */
#ifndef VGPU_MODE_PATH
#define VGPU_MODE_PATH "/run/vgpu/mode"
#endif

/* False for "driver", for an absent file and for a word that this version does not know. */
bool mode_is_staged(void);

#endif
