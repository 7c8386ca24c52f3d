/* The thread that gives this process's offered memory to other processes, whatever the application's threads do.
 *
 * It starts when a process first asks for a legacy IPC handle, listens under a random name, and calls no driver. It
 * holds sockets only while it is open: it is closed while memory is away and between DETACH and the agent's return,
 * and then listens under the same name again, so that handles stay good. The helper thread closes and opens it.
 */
#ifndef VGPU_SHARE_SERVICE_H
#define VGPU_SHARE_SERVICE_H

#include <stdbool.h>

#include "share_handle.h"

/* Starts it if need be and fills in where it is. False: no thread or no random numbers. */
bool share_service_start(struct share_handle *where);

/* True when the handle was given by this process. */
bool share_service_is_mine(const struct share_handle *handle);

enum share_closing { CLOSED_FOR_DETACH = 1, CLOSED_FOR_RELEASE = 2 };

/* On return no socket of the service is left; false: it did not let go in time. */
bool share_service_close(enum share_closing reason);
void share_service_open(enum share_closing reason);

/* How many threads of the process are the service's: 0 or 1. */
unsigned int share_service_threads(void);

/* For the last thread of the process: the service ends. */
void share_service_end(void);

void share_service_after_fork_in_child(void);

#endif
