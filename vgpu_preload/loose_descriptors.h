/* Descriptors of ours that are in no other table: sockets between processes, device memory on its way to one.
 *
 * Any thread of the application may fork while another is between two of our system calls. So each of these comes to be
 * and goes under one lock, which fork takes too, and the child closes all that are in the list. Nothing here blocks.
 */
#ifndef VGPU_LOOSE_DESCRIPTORS_H
#define VGPU_LOOSE_DESCRIPTORS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* A Unix socket of whole messages, not blocking, close-on-exec, with a high number, for which the limit of open files is
 * raised. -1: no room. */
int loose_socket(void);

int loose_accept(int listener);

/* Takes an open descriptor into the list; closes it and gives -1 when the list is full. */
int loose_note(int descriptor);

/* Another number of the same open file: loose, or in a place of a table that the child of a fork goes through. */
struct kept_descriptor;
int loose_copy(const struct kept_descriptor *kept);
void loose_keep_copy(int descriptor, struct kept_descriptor *place);

/* Like recvmsg and sendmsg with one descriptor or none (-1). */
ssize_t loose_receive(int socket, void *bytes, size_t size, int *descriptor);
ssize_t loose_send(int socket, const void *bytes, size_t size, int descriptor);

/* False when the application has put something else under the number. */
bool loose_is_ours(int descriptor);

/* Ends the waiting of whoever polls it, without closing it. */
void loose_shut_down(int descriptor);

/* Closes it if it is still ours; -1 is nothing. */
void loose_close(int descriptor);

void loose_before_fork(void);
void loose_after_fork_in_parent(void);
void loose_after_fork_in_child(void);

#endif
