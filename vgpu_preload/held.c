#define _GNU_SOURCE
#include "held.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "driver.h"
#include "objects.h"

/* Open addressing in memory of our own. Half full is the limit; what comes then is counted as missing by the agent's
 * comparison with the driver's figure, and a quarter of a million small allocations have other problems. */
#define PLACES (1U << 19)
#define MOST_ENTRIES (PLACES / 2)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct held_entry *entries;
static unsigned int entry_count;
static struct held_sum sums[HELD_KINDS];
static _Atomic(bool) has_had[HELD_KINDS];

static const struct {
    const char *name;
    const char *meaning;
} words[HELD_KINDS] = {
    [HELD_SMALL] = {"small", "cuMemAlloc below 2 MiB"},
    [HELD_LARGE] = {"large", "cuMemAlloc that stayed with the driver"},
    [HELD_POOL] = {"pool", "stream-ordered allocations"},
    [HELD_ARRAY] = {"array", "arrays"},
    [HELD_VMM] = {"vmm", "cuMemCreate that cannot be shared by descriptor"},
    [BLOCKER_MANAGED] = {"managed", "managed memory"},
    [BLOCKER_MULTICAST] = {"multicast", "multicast object"},
    [BLOCKER_IMPORT] = {"import", "memory imported with cuMemImportFromShareableHandle"},
    [BLOCKER_EXPORT] = {"export", "memory given away with cuMemExportToShareableHandle"},
    [BLOCKER_FABRIC] = {"fabric", "memory shared by a fabric handle"},
    [BLOCKER_HOST_VMM] = {"host-vmm", "memory on the host, made with cuMemCreate or imported"},
    [BLOCKER_IPC_OPENED] = {"ipc-opened", "memory of another process opened with cuIpcOpenMemHandle"},
    [BLOCKER_IPC_EXPORTED] = {"ipc-exported", "memory offered to other processes with cuIpcGetMemHandle"},
    [BLOCKER_IPC_EVENT] = {"ipc-event", "event shared with another process by a legacy IPC handle"},
    [BLOCKER_POOL_SHARED] = {"pool-shared", "memory pool shared with another process"},
    [BLOCKER_EXTERNAL_MEMORY] = {"external-memory", "memory imported from another API"},
    [BLOCKER_DMABUF] = {"dmabuf", "memory exported with cuMemGetHandleForAddressRange"},
};

static _Atomic(uint64_t) unknown_call;

void held_note_unknown_call(const void *function)
{
    atomic_store(&unknown_call, (uint64_t)(uintptr_t)function);
}

uint64_t held_unknown_call(void)
{
    return atomic_load(&unknown_call);
}

const char *held_name(enum held_kind kind)
{
    return words[kind].name;
}

const char *held_meaning(enum held_kind kind)
{
    return words[kind].meaning;
}

bool held_make(void)
{
    if (entries != NULL) return true;
    size_t bytes = PLACES * sizeof *entries;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    entries = memory;
    return true;
}

void held_forget_all(void)
{
    pthread_mutex_init(&lock, NULL);
    if (entries != NULL) munmap(entries, PLACES * sizeof *entries);
    entries = NULL;
    entry_count = 0;
    memset(sums, 0, sizeof sums);
}

static unsigned int place_of(uint64_t key)
{
    return (unsigned int)(key * 0x9e3779b97f4a7c15ULL >> (64 - 19));
}

static struct held_entry *find(uint64_t key)
{
    unsigned int place = place_of(key);
    while (entries[place].kind != HELD_NOTHING && entries[place].key != key) place = (place + 1) % PLACES;
    return &entries[place];
}

static void forget(struct held_entry *entry)
{
    sums[entry->kind].count--;
    sums[entry->kind].bytes -= entry->bytes;
    entry_count--;
    /* Entries behind the hole that would not be found across it move into it. */
    unsigned int hole = (unsigned int)(entry - entries), place = hole;
    for (;;) {
        place = (place + 1) % PLACES;
        if (entries[place].kind == HELD_NOTHING) break;
        unsigned int home = place_of(entries[place].key);
        if ((place - home) % PLACES < (place - hole) % PLACES) continue;
        entries[hole] = entries[place];
        hole = place;
    }
    entries[hole] = (struct held_entry){0};
}

void held_add(enum held_kind kind, uint64_t key, uint64_t bytes, CUcontext context)
{
    if (entries == NULL) return;
    atomic_store(&has_had[kind], true);
    pthread_mutex_lock(&lock);
    struct held_entry *entry = find(key);
    /* A key that is there already: a context went without our notice, and the driver gave the address again. */
    if (entry->kind != HELD_NOTHING) forget(entry);
    if (entry_count < MOST_ENTRIES) {
        *find(key) = (struct held_entry){.key = key, .bytes = bytes, .kind = kind, .context = context};
        entry_count++;
        sums[kind].count++;
        sums[kind].bytes += bytes;
    }
    pthread_mutex_unlock(&lock);
}

struct held_entry held_take(uint64_t key)
{
    struct held_entry taken = {0};
    if (entries == NULL) return taken;
    pthread_mutex_lock(&lock);
    struct held_entry *entry = find(key);
    taken = *entry;
    if (entry->kind != HELD_NOTHING) forget(entry);
    pthread_mutex_unlock(&lock);
    return taken;
}

void held_put_back(const struct held_entry *entry)
{
    if (entry->kind != HELD_NOTHING) held_add(entry->kind, entry->key, entry->bytes, entry->context);
}

void held_given_away(uint64_t key, enum held_kind kind)
{
    struct held_entry entry = held_take(key);
    if (entry.kind == HELD_VMM) entry.kind = kind;
    held_put_back(&entry);
}

void held_remove(uint64_t key)
{
    held_take(key);
}

void held_add_allocation(CUdeviceptr address, uint64_t bytes)
{
    CUcontext context = NULL;
    driver.cuCtxGetCurrent(&context);
    held_add(bytes < STAGED_LEAST_BYTES ? HELD_SMALL : HELD_LARGE, address, bytes, context);
}

void held_add_array(uint64_t key, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    /* The low bits of CUarray_format 1, 2, 3, 8, 9, 10, 16 and 32; other formats are counted as 4 bytes. */
    static const unsigned char sizes[] = {4, 1, 2, 4, 4, 4, 4, 4, 1, 2, 4, 4, 4, 4, 4, 4, 2};
    uint64_t element = shape->Format >= 0 && shape->Format <= 16 ? sizes[shape->Format] : 4;
    uint64_t height = shape->Height != 0 ? shape->Height : 1, depth = shape->Depth != 0 ? shape->Depth : 1;
    CUcontext context = NULL;
    driver.cuCtxGetCurrent(&context);
    held_add(HELD_ARRAY, key, element * shape->NumChannels * shape->Width * height * depth, context);
}

uint64_t held_export_key(uint64_t address)
{
    return address | 1; /* addresses and handles of the driver are even */
}

void held_remove_context(CUcontext context)
{
    if (entries == NULL || context == NULL) return;
    pthread_mutex_lock(&lock);
    for (unsigned int place = 0; place < PLACES && entry_count > 0; place++)
        while (entries[place].kind != HELD_NOTHING && entries[place].context == context) forget(&entries[place]);
    pthread_mutex_unlock(&lock);
}

bool held_has_had(enum held_kind kind)
{
    return atomic_load_explicit(&has_had[kind], memory_order_relaxed);
}

struct held_sum held_sum(enum held_kind kind)
{
    pthread_mutex_lock(&lock);
    struct held_sum sum = sums[kind];
    pthread_mutex_unlock(&lock);
    return sum;
}

unsigned int held_next_blocker(unsigned int place, struct held_entry *entry)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    uint64_t blockers = 0;
    for (int kind = HELD_LAST_OF_DRIVER + 1; kind < HELD_KINDS; kind++) blockers += sums[kind].count;
    for (; blockers > 0 && entries != NULL && entry_count > 0 && !found && place < PLACES; place++) {
        *entry = entries[place];
        found = entry->kind > HELD_LAST_OF_DRIVER;
    }
    pthread_mutex_unlock(&lock);
    return found ? place : 0;
}
