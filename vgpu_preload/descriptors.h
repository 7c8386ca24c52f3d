/* Descriptors that stand for device memory, held inside somebody else's program.
 *
 * They get high numbers, above what programs count and close, are close-on-exec, and are looked at before each use: an
 * application may close all descriptors and open files of its own under the numbers.
 */
#ifndef VGPU_DESCRIPTORS_H
#define VGPU_DESCRIPTORS_H

#include <stdbool.h>
#include <sys/types.h>

struct descriptor_identity {
    dev_t device;
    ino_t inode;
};

/* Raises the soft limit of open files to the hard one, and puts it back. Descriptors above the limit stay open. */
void descriptors_allow_more(void);
void descriptors_allow_as_before(void);

/* The same file under a high number; `descriptor` is closed in any case. -1: there is no room. */
int descriptor_move_up(int descriptor);

struct descriptor_identity descriptor_identity_of(int descriptor);
bool descriptor_is_still(int descriptor, struct descriptor_identity identity);

/* One more for the application. */
bool descriptor_copy(int descriptor, int *copy);

#endif
