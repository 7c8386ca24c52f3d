/* The one socket to the node agent, and the care it takes to own a descriptor inside somebody else's program.
 *
 * The descriptor is close-on-exec, has a high number, and its identity (device and inode) is checked before each use:
 * the application may close all descriptors or open a file of its own under the number. A descriptor that is not ours
 * any more is forgotten, never written to and never closed. Every wait has a deadline. The helper thread is the only
 * user; the fork handlers look at it under the lock.
 */
#ifndef VGPU_CONNECTION_H
#define VGPU_CONNECTION_H

#include <stdbool.h>
#include <stddef.h>

/* Fixed when the library is built: an environment variable would let a program's caller choose who is told. */
#ifndef VGPU_SOCKET_PATH
#define VGPU_SOCKET_PATH "/run/vgpu/agent.sock"
#endif

/* True when something that may be the agent's socket exists; opens nothing. */
bool agent_socket_exists(void);

bool connection_open(void);

/* Closes the socket if it is still ours. */
void connection_close(void);

/* Waits until there is something to read or the time is over. */
enum readiness { READY, QUIET, BROKEN };
enum readiness connection_wait(int milliseconds);

/* All bytes or false; false means that the connection is of no more use. */
bool connection_send(const void *bytes, size_t size, int deadline_ms);
bool connection_receive(void *bytes, size_t size, int deadline_ms);

/* The same with descriptors at the first byte. What is received is the caller's to close; close-on-exec. */
#define MOST_DESCRIPTORS 253 /* the kernel's SCM_MAX_FD */
bool connection_send_with(const void *bytes, size_t size, const int *descriptors, size_t count, int deadline_ms);
bool connection_receive_with(void *bytes, size_t size, int *descriptors, size_t *count, int deadline_ms);

/* Around fork: no descriptor comes to be between them, and the child gives up the one it inherited. */
void connection_before_fork(void);
void connection_after_fork_in_parent(void);
void connection_after_fork_in_child(void);

#endif
