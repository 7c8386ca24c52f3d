/* Finds functions in the ELF objects that are loaded in this process, by reading their dynamic symbol tables.
 *
 * Needs no dlsym, so it can find the real one whatever libc this is; leaves dlerror() as it was, allocates nothing, and
 * works before any constructor has run. Order means load order, which is the order of the global symbol scope.
 * This library's own symbols are never found.
 */
#ifndef VGPU_LOADED_OBJECTS_H
#define VGPU_LOADED_OBJECTS_H

#include <stdbool.h>

#define BUILD_ID_HEX_SIZE 41

/* First definition behind this library, what RTLD_NEXT would give it plus objects loaded RTLD_LOCAL; failing that the
 * first one before it (an executable that defines it). NULL: nobody defines it. */
void *loaded_next(const char *name);

/* The same without dl_iterate_phdr, which sanitizers and unwinders replace and which they find through dlsym: the first
 * dlsym of a process must not need it. Takes no lock, so only for what is loaded from the start, such as libc. */
void *linked_next(const char *name);

/* First definition of all, executable included. */
void *loaded_first(const char *name);

/* Last definition of all: the bottom of a chain of interposers. */
void *loaded_last(const char *name);

/* The definition in the object that contains `address`. */
void *loaded_beside(const void *address, const char *name);

/* The definition that a reference in the object around `caller` means when several objects define the name: its own, or
 * that of a library it names as needed, the first in load order as the linkers take it. NULL: neither has one. */
void *loaded_for(const void *caller, const char *name);

/* True when more than one object defines the name. */
bool loaded_twice(const char *name);

/* Another number after each object that was loaded or unloaded. */
unsigned long long loaded_changes(void);

/* Writes this library's own GNU build id in hex, or an empty string. */
void own_build_id(char hex[BUILD_ID_HEX_SIZE]);

#endif
