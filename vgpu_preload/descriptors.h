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

/* Raises the soft limit of open files to the hard one, and puts it back. Descriptors above the limit stay open. Any
 * thread may: the last one that is done puts it back. */
void descriptors_allow_more(void);
void descriptors_allow_as_before(void);

/* The same file under a high number; `descriptor` is closed in any case. -1: there is no room. */
int descriptor_move_up(int descriptor);

struct descriptor_identity descriptor_identity_of(int descriptor);
bool descriptor_is_still(int descriptor, struct descriptor_identity identity);

/* Puts the open file of `descriptor` under `number`, which stays close-on-exec or not, where `seen` still is there. */
void descriptor_exchange(int number, struct descriptor_identity seen, int descriptor);

/* A descriptor that is held on to, whatever the application does under its number. */
struct kept_descriptor {
    int number; /* -1: none */
    struct descriptor_identity identity;
};
extern const struct kept_descriptor no_descriptor;

/* Keeps `descriptor` itself; -1 gives no_descriptor. */
struct kept_descriptor descriptor_keep(int descriptor);

/* Keeps another number of the same open file, a high one; the limit of open files is raised for it. */
struct kept_descriptor descriptor_keep_copy(int descriptor);

/* One more for the application. False: there is none, it is not ours any more, or no number is left. */
bool kept_copy(const struct kept_descriptor *kept, int *copy);

/* Closes it if it is still ours. */
void kept_close(struct kept_descriptor *kept);

/* In a forked child, where no other thread is left. */
void descriptors_after_fork_in_child(void);

#endif
