/* Looks a function up by name in the dynamic symbol table of one loaded object.
 *
 * Pure reading of mapped memory: calls no function of libc, because a sanitizer's runtime or a malloc replacement may
 * come here through dlsym before the libc functions that it replaces are usable.
 */
#ifndef VGPU_ELF_SYMBOLS_H
#define VGPU_ELF_SYMBOLS_H

#include <link.h>
#include <stdbool.h>
#include <stddef.h>

/* Prefers the default version of a symbol. NULL: this object does not define it. */
void *elf_definition(ElfW(Addr) base, const ElfW(Dyn) *dynamic, const char *name);

/* The name that an object gives itself; an empty string when it has none. */
const char *elf_soname(ElfW(Addr) base, const ElfW(Dyn) *dynamic);

/* True when the object names this library among those it needs. */
bool elf_needs(ElfW(Addr) base, const ElfW(Dyn) *dynamic, const char *library);

static inline bool same_name(const char *one, const char *other)
{
    while (*one != '\0' && *one == *other) one++, other++;
    return *one == *other;
}

#endif
