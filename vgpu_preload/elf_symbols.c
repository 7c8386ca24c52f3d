#define _GNU_SOURCE
#include "elf_symbols.h"

#include <elf.h>
#include <stdint.h>

/* The parts of one object's dynamic section that a lookup by name needs. */
struct symbols {
    ElfW(Addr) base;
    const ElfW(Sym) * table;
    const char *names;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
    const ElfW(Half) * versions;
};

/* glibc has rewritten these entries to addresses, musl and the vdso keep offsets; an offset lies below any base. */
static const void *entry_address(ElfW(Addr) base, ElfW(Addr) value)
{
    return (const void *)(value < base ? base + value : value);
}

static bool symbols_of(ElfW(Addr) base, const ElfW(Dyn) *dynamic, struct symbols *out)
{
    *out = (struct symbols){.base = base};
    for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++) {
        const void *address = entry_address(out->base, entry->d_un.d_ptr);
        switch (entry->d_tag) {
        case DT_SYMTAB: out->table = address; break;
        case DT_STRTAB: out->names = address; break;
        case DT_GNU_HASH: out->gnu_hash = address; break;
        case DT_HASH: out->sysv_hash = address; break;
        case DT_VERSYM: out->versions = address; break;
        default: break;
        }
    }
    return out->table != NULL && out->names != NULL;
}

static bool is_definition(const struct symbols *in, uint32_t index, const char *name)
{
    const ElfW(Sym) *symbol = &in->table[index];
    int type = symbol->st_info & 0xf;
    if (symbol->st_shndx == SHN_UNDEF || symbol->st_value == 0) return false;
    if (type != STT_FUNC && type != STT_NOTYPE) return false;
    return same_name(in->names + symbol->st_name, name);
}

/* An old version of a symbol (dlsym@GLIBC_2.2.5 beside dlsym@@GLIBC_2.34) is taken only when there is no default. */
static bool is_old_version(const struct symbols *in, uint32_t index)
{
    return in->versions != NULL && (in->versions[index] & 0x8000) != 0;
}

static uint32_t gnu_hash_of(const char *name)
{
    uint32_t hash = 5381;
    for (; *name != '\0'; name++) hash = hash * 33 + (unsigned char)*name;
    return hash;
}

/* Layout: bucket count, first hashed symbol, bloom words, bloom shift, bloom filter, buckets, one word per symbol whose
 * lowest bit ends a chain. */
static uint32_t find_by_gnu_hash(const struct symbols *in, const char *name)
{
    const uint32_t *header = in->gnu_hash;
    uint32_t bucket_count = header[0], first_hashed = header[1];
    if (bucket_count == 0) return 0;
    const uint32_t *buckets = header + 4 + header[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = buckets + bucket_count;
    uint32_t hash = gnu_hash_of(name), index = buckets[hash % bucket_count], old = 0;
    if (index < first_hashed) return 0;
    for (;; index++) {
        uint32_t word = chain[index - first_hashed];
        if ((word | 1) == (hash | 1) && is_definition(in, index, name)) {
            if (!is_old_version(in, index)) return index;
            old = index;
        }
        if (word & 1) return old;
    }
}

static uint32_t sysv_hash_of(const char *name)
{
    uint32_t hash = 0;
    for (; *name != '\0'; name++) {
        hash = (hash << 4) + (unsigned char)*name;
        hash ^= (hash & 0xf0000000U) >> 24;
        hash &= 0x0fffffffU;
    }
    return hash;
}

static uint32_t find_by_sysv_hash(const struct symbols *in, const char *name)
{
    const uint32_t *header = in->sysv_hash;
    uint32_t bucket_count = header[0], old = 0;
    if (bucket_count == 0) return 0;
    const uint32_t *chain = header + 2 + bucket_count;
    for (uint32_t index = header[2 + sysv_hash_of(name) % bucket_count]; index != 0; index = chain[index]) {
        if (!is_definition(in, index, name)) continue;
        if (!is_old_version(in, index)) return index;
        old = index;
    }
    return old;
}

void *elf_definition(ElfW(Addr) base, const ElfW(Dyn) *dynamic, const char *name)
{
    struct symbols symbols;
    uint32_t index = 0;
    if (!symbols_of(base, dynamic, &symbols)) return NULL;
    if (symbols.gnu_hash != NULL)
        index = find_by_gnu_hash(&symbols, name);
    else if (symbols.sysv_hash != NULL)
        index = find_by_sysv_hash(&symbols, name);
    return index == 0 ? NULL : (void *)(symbols.base + symbols.table[index].st_value);
}

const char *elf_soname(ElfW(Addr) base, const ElfW(Dyn) *dynamic)
{
    struct symbols symbols;
    if (!symbols_of(base, dynamic, &symbols)) return "";
    for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == DT_SONAME) return symbols.names + entry->d_un.d_val;
    return "";
}

bool elf_needs(ElfW(Addr) base, const ElfW(Dyn) *dynamic, const char *library)
{
    struct symbols symbols;
    if (library[0] == '\0' || !symbols_of(base, dynamic, &symbols)) return false;
    for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == DT_NEEDED && same_name(symbols.names + entry->d_un.d_val, library)) return true;
    return false;
}
