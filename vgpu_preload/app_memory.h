/* The application's own use of virtual memory management: its handles are tokens of ours, its mappings are followed. */
#ifndef VGPU_APP_MEMORY_H
#define VGPU_APP_MEMORY_H

#include <stdbool.h>

#include "objects.h"

/* The driver's handle for what the application holds; what is no token of ours is returned as it is. */
CUmemGenericAllocationHandle handle_of_token(CUmemGenericAllocationHandle token);

/* True when the address lies in memory that cuMemAlloc or cuIpcOpenMemHandle gave: VMM calls on it fail, as with the
 * plain driver. */
bool app_memory_is_allocation(CUdeviceptr address, size_t size);

void app_memory_mapped(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle token);

/* Around an unmapping: the mappings of the range out of the address table, as a chain; then gone, or back. */
struct memory_mapping *app_memory_hide(CUdeviceptr address, size_t size);
void app_memory_unmapped(struct memory_mapping *chain);
void app_memory_show(struct memory_mapping *chain);

void app_memory_access_set(CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t count);

/* One more reference to the handle behind an address, as a token. */
bool app_memory_retain(CUdeviceptr address, CUmemGenericAllocationHandle *token);

/* The driver's handle and what the application asked to share by; false: no token of ours. */
bool app_memory_properties(CUmemGenericAllocationHandle token, CUmemGenericAllocationHandle *handle, int *asked);

/* Why the object cannot be moved from now on. */
void app_memory_set_obstacle(CUmemGenericAllocationHandle token, const char *obstacle);

#endif
