#define _GNU_SOURCE
#include "loaded_objects.h"

#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <string.h>
#include <sys/auxv.h>

#include "elf_symbols.h"

enum which { NEXT_OF_US, FIRST, LAST, BESIDE };

struct search {
    const char *name;
    enum which which;
    const void *beside;
    bool past_us;
    void *found;
    bool found_is_before_us;
};

static const char address_of_ours;
extern ElfW(Dyn) _DYNAMIC[] __attribute__((visibility("hidden")));

static bool object_contains(const struct dl_phdr_info *info, const void *address)
{
    ElfW(Addr) offset = (ElfW(Addr))address - info->dlpi_addr;
    for (int n = 0; n < info->dlpi_phnum; n++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[n];
        if (segment->p_type == PT_LOAD && offset - segment->p_vaddr < segment->p_memsz) return true;
    }
    return false;
}

static void *definition_in(const struct dl_phdr_info *info, const char *name)
{
    for (int n = 0; n < info->dlpi_phnum; n++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[n];
        if (segment->p_type != PT_DYNAMIC) continue;
        return elf_definition(info->dlpi_addr, (const ElfW(Dyn) *)(info->dlpi_addr + segment->p_vaddr), name);
    }
    return NULL;
}

/* Called per object by dl_iterate_phdr; returns 1 to end the walk. */
static int look_into(struct dl_phdr_info *info, size_t size, void *argument)
{
    struct search *search = argument;
    (void)size;
    if (object_contains(info, &address_of_ours)) {
        search->past_us = true;
        return 0;
    }
    if (search->which == BESIDE && !object_contains(info, search->beside)) return 0;
    void *definition = definition_in(info, search->name);
    if (definition == NULL) return search->which == BESIDE;
    bool replaces = search->found == NULL || search->which == LAST || search->found_is_before_us;
    if (replaces) {
        search->found = definition;
        search->found_is_before_us = search->which == NEXT_OF_US && !search->past_us;
    }
    return search->which != LAST && !search->found_is_before_us;
}

static void *search_for(struct search search)
{
    dl_iterate_phdr(look_into, &search);
    return search.found;
}

void *loaded_next(const char *name)
{
    return search_for((struct search){.name = name, .which = NEXT_OF_US});
}

void *loaded_first(const char *name)
{
    return search_for((struct search){.name = name, .which = FIRST});
}

void *loaded_last(const char *name)
{
    return search_for((struct search){.name = name, .which = LAST});
}

void *loaded_beside(const void *address, const char *name)
{
    return search_for((struct search){.name = name, .which = BESIDE, .beside = address});
}

bool loaded_twice(const char *name)
{
    return loaded_first(name) != loaded_last(name);
}

static const ElfW(Dyn) *dynamic_of(const struct dl_phdr_info *info)
{
    for (int n = 0; n < info->dlpi_phnum; n++)
        if (info->dlpi_phdr[n].p_type == PT_DYNAMIC)
            return (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[n].p_vaddr);
    return NULL;
}

struct needs {
    const void *caller;
    const char *name;
    ElfW(Addr) base; /* of the caller's object */
    const ElfW(Dyn) *dynamic;
    void *own;
    void *needed;
};

static int find_caller(struct dl_phdr_info *info, size_t size, void *argument)
{
    struct needs *needs = argument;
    (void)size;
    if (!object_contains(info, needs->caller)) return 0;
    needs->base = info->dlpi_addr;
    needs->dynamic = dynamic_of(info);
    if (!object_contains(info, &address_of_ours)) needs->own = definition_in(info, needs->name);
    return 1;
}

static bool is_needed(const struct needs *needs, const struct dl_phdr_info *info)
{
    const ElfW(Dyn) *dynamic = dynamic_of(info);
    const char *file = info->dlpi_name != NULL ? info->dlpi_name : "";
    for (const char *at = file; *at != '\0'; at++)
        if (*at == '/') file = at + 1;
    return elf_needs(needs->base, needs->dynamic, file) ||
           elf_needs(needs->base, needs->dynamic, elf_soname(info->dlpi_addr, dynamic));
}

static int find_needed(struct dl_phdr_info *info, size_t size, void *argument)
{
    struct needs *needs = argument;
    (void)size;
    if (object_contains(info, &address_of_ours) || dynamic_of(info) == NULL || !is_needed(needs, info)) return 0;
    needs->needed = definition_in(info, needs->name);
    return needs->needed != NULL;
}

void *loaded_for(const void *caller, const char *name)
{
    struct needs needs = {.caller = caller, .name = name};
    dl_iterate_phdr(find_caller, &needs);
    if (needs.own != NULL || needs.dynamic == NULL) return needs.own;
    dl_iterate_phdr(find_needed, &needs);
    return needs.needed;
}

static int count_changes(struct dl_phdr_info *info, size_t size, void *changes)
{
    if (size >= offsetof(struct dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs)
        *(unsigned long long *)changes = info->dlpi_adds + info->dlpi_subs + 1;
    return 1;
}

unsigned long long loaded_changes(void)
{
    unsigned long long changes = 0;
    dl_iterate_phdr(count_changes, &changes);
    return changes;
}

/* The dynamic section of the executable, from the program headers that the kernel reported. */
static const ElfW(Dyn) *executable_dynamic(void)
{
    const ElfW(Phdr) *headers = (const ElfW(Phdr) *)getauxval(AT_PHDR);
    size_t count = getauxval(AT_PHNUM);
    const ElfW(Phdr) *dynamic = NULL, *self = NULL;
    for (size_t n = 0; headers != NULL && n < count; n++) {
        if (headers[n].p_type == PT_DYNAMIC) dynamic = &headers[n];
        if (headers[n].p_type == PT_PHDR) self = &headers[n];
    }
    if (dynamic == NULL || self == NULL) return NULL;
    return (const ElfW(Dyn) *)((ElfW(Addr))headers - self->p_vaddr + dynamic->p_vaddr);
}

/* The list that every dynamic linker keeps for debuggers. */
static const struct link_map *linked_objects(void)
{
    const ElfW(Dyn) *entry = executable_dynamic();
    while (entry != NULL && entry->d_tag != DT_NULL && entry->d_tag != DT_DEBUG) entry++;
    if (entry == NULL || entry->d_tag == DT_NULL || entry->d_un.d_ptr == 0) return NULL;
    return ((const struct r_debug *)entry->d_un.d_ptr)->r_map;
}

void *linked_next(const char *name)
{
    void *before_us = NULL;
    bool past_us = false;
    const struct link_map *object = linked_objects();
    if (object == NULL) return loaded_next(name);
    for (; object != NULL; object = object->l_next) {
        if (object->l_ld == _DYNAMIC) {
            past_us = true;
            continue;
        }
        void *definition = elf_definition(object->l_addr, object->l_ld, name);
        if (definition != NULL && past_us) return definition;
        if (before_us == NULL) before_us = definition;
    }
    return before_us;
}

static void write_hex(const unsigned char *bytes, size_t size, char *hex)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t n = 0; n < size; n++) {
        hex[2 * n] = digits[bytes[n] >> 4];
        hex[2 * n + 1] = digits[bytes[n] & 0xf];
    }
    hex[2 * size] = '\0';
}

static void read_build_id(const char *note, const char *end, char *hex)
{
    while (note + sizeof(ElfW(Nhdr)) <= end) {
        const ElfW(Nhdr) *header = (const ElfW(Nhdr) *)note;
        const char *owner = note + sizeof *header;
        const char *content = owner + ((header->n_namesz + 3) & ~3U);
        if (header->n_type == NT_GNU_BUILD_ID && header->n_namesz == 4 && memcmp(owner, "GNU", 4) == 0 &&
            header->n_descsz <= (BUILD_ID_HEX_SIZE - 1) / 2)
            write_hex((const unsigned char *)content, header->n_descsz, hex);
        note = content + ((header->n_descsz + 3) & ~3U);
    }
}

static int read_own_notes(struct dl_phdr_info *info, size_t size, void *hex)
{
    (void)size;
    if (!object_contains(info, &address_of_ours)) return 0;
    for (int n = 0; n < info->dlpi_phnum; n++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[n];
        const char *notes = (const char *)(info->dlpi_addr + segment->p_vaddr);
        if (segment->p_type == PT_NOTE) read_build_id(notes, notes + segment->p_memsz, hex);
    }
    return 1;
}

void own_build_id(char hex[BUILD_ID_HEX_SIZE])
{
    hex[0] = '\0';
    dl_iterate_phdr(read_own_notes, hex);
}
