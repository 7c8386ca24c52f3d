#include "communicators.h"

#include <pthread.h>
#include <string.h>

#include "random.h"

/* In place of the handle of an entry that was taken out, so that what lies behind it is still found. */
static const char gone;
#define GONE ((const void *)&gone)

struct communicator communicator_table[COMMUNICATOR_PLACES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int entry_count;
static bool was_used;
static _Atomic(unsigned long) unlisted;

void communicators_note_unlisted(void)
{
    atomic_fetch_add(&unlisted, 1);
}

unsigned long communicators_unlisted(void)
{
    return atomic_load(&unlisted);
}

static struct communicator *free_place(const void *handle)
{
    unsigned int place = communicator_place(handle);
    for (unsigned int n = 0; n < COMMUNICATOR_PROBES; n++, place = (place + 1) % COMMUNICATOR_PLACES) {
        const void *found = atomic_load(&communicator_table[place].handle);
        if (found == NULL || found == GONE) return &communicator_table[place];
    }
    return NULL;
}

/* With the lock held. A place is filled before its handle is there to be found. */
static struct communicator *put(const struct communicator_rest *rest)
{
    struct communicator *entry = communicator_find(rest->handle);
    bool is_new = entry == NULL;
    if (is_new && entry_count < MOST_COMMUNICATORS) entry = free_place(rest->handle);
    if (entry == NULL) return NULL;
    entry_count += is_new;
    was_used = true;
    entry->facts = rest->facts;
    entry->library = rest->library;
    entry->wanted_size = rest->facts.size;
    atomic_store(&entry->collectives, rest->collectives);
    atomic_store(&entry->point_to_point, rest->point_to_point);
    atomic_store(&entry->splits, rest->splits);
    atomic_store(&entry->shrinks, rest->shrinks);
    atomic_store(&entry->tries, 0);
    atomic_store(&entry->is_finalized, rest->is_finalized);
    atomic_store(&entry->is_known, rest->facts.is_known);
    atomic_store_explicit(&entry->handle, rest->handle, memory_order_release);
    return entry;
}

/* With the lock held. */
static void copy(struct communicator *entry, struct communicator_rest *rest)
{
    *rest = (struct communicator_rest){
        .handle = atomic_load(&entry->handle),
        .library = entry->library,
        .facts = entry->facts,
        .collectives = atomic_load(&entry->collectives),
        .point_to_point = atomic_load(&entry->point_to_point),
        .splits = atomic_load(&entry->splits),
        .shrinks = atomic_load(&entry->shrinks),
        .is_finalized = atomic_load(&entry->is_finalized),
    };
}

struct communicator *communicator_add(const void *handle, const void *library, const struct communicator_facts *facts)
{
    struct communicator_rest rest = {.handle = handle, .library = library, .facts = *facts};
    pthread_mutex_lock(&lock);
    struct communicator *entry = put(&rest);
    pthread_mutex_unlock(&lock);
    if (entry == NULL) communicators_note_unlisted();
    return entry;
}

void communicator_learn(struct communicator *entry, int rank, int size, int device, int version)
{
    if (size == 0) return;
    pthread_mutex_lock(&lock);
    entry->facts.rank = rank;
    entry->facts.size = size;
    entry->facts.device = device;
    entry->facts.version = version;
    entry->facts.is_known = true;
    atomic_store(&entry->is_known, true);
    pthread_mutex_unlock(&lock);
}

bool communicator_take(const void *handle, struct communicator_rest *rest)
{
    pthread_mutex_lock(&lock);
    struct communicator *entry = communicator_find(handle);
    if (entry != NULL) {
        copy(entry, rest);
        atomic_store(&entry->handle, GONE);
        entry_count--;
    }
    pthread_mutex_unlock(&lock);
    return entry != NULL;
}

void communicator_put_back(const struct communicator_rest *rest)
{
    pthread_mutex_lock(&lock);
    struct communicator *entry = communicator_find(rest->handle);
    if (entry == NULL) entry = put(rest);
    pthread_mutex_unlock(&lock);
    if (entry == NULL) communicators_note_unlisted();
}

bool communicator_next(unsigned int *place, struct communicator_rest *rest)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (; !found && *place < COMMUNICATOR_PLACES; ++*place) {
        const void *handle = atomic_load(&communicator_table[*place].handle);
        found = handle != NULL && handle != GONE;
        if (found) copy(&communicator_table[*place], rest);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* FNV-1a of 128 bits. */
typedef unsigned __int128 hash128;
#define HASH_START (((hash128)0x6c62272e07bb0142ULL << 64) | 0x62b821756295c58dULL)
#define HASH_PRIME (((hash128)1 << 88) | 0x13b)

static hash128 hash_bytes(hash128 hash, const void *bytes, size_t size)
{
    for (const unsigned char *byte = bytes; size > 0; byte++, size--) hash = (hash ^ *byte) * HASH_PRIME;
    return hash;
}

static hash128 hash_integer(hash128 hash, uint32_t value)
{
    unsigned char bytes[4];
    for (int n = 0; n < 4; n++) bytes[n] = (unsigned char)(value >> 8 * n);
    return hash_bytes(hash, bytes, sizeof bytes);
}

static struct communicator_id id_of(hash128 hash)
{
    struct communicator_id id;
    for (int n = 0; n < COMMUNICATOR_ID_SIZE; n++) id.bytes[n] = (unsigned char)(hash >> 8 * (15 - n));
    return id;
}

struct communicator_id communicator_id_of(const void *unique_ids, size_t size)
{
    return id_of(hash_bytes(HASH_START, unique_ids, size));
}

static struct communicator_id id_of_child(const struct communicator_id *parent, const char *word, int what, uint32_t nth)
{
    hash128 hash = hash_bytes(HASH_START, parent->bytes, sizeof parent->bytes);
    hash = hash_bytes(hash, word, strlen(word));
    return id_of(hash_integer(hash_integer(hash, (uint32_t)what), nth));
}

struct communicator_id communicator_id_of_split(const struct communicator_id *parent, int color, uint32_t split)
{
    return id_of_child(parent, "split", color, split);
}

struct communicator_id communicator_id_of_shrink(const struct communicator_id *parent, int excluded, uint32_t shrink)
{
    return id_of_child(parent, "shrink", excluded, shrink);
}

struct communicator_id communicator_id_of_its_own(void)
{
    static _Atomic(uint32_t) given;
    struct communicator_id id;
    if (random_bytes(id.bytes, sizeof id.bytes)) return id;
    hash128 hash = hash_integer(HASH_START, (uint32_t)getpid());
    return id_of(hash_integer(hash, atomic_fetch_add(&given, 1)));
}

void communicators_after_fork_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    entry_count = 0;
    atomic_store(&unlisted, 0);
    for (unsigned int place = 0; was_used && place < COMMUNICATOR_PLACES; place++)
        if (atomic_load(&communicator_table[place].handle) != NULL)
            atomic_store(&communicator_table[place].handle, NULL);
    was_used = false;
}
