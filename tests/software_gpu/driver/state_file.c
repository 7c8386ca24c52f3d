/* Reads and writes the device state files (state_file.h). Knows nothing of CUDA; libcuda and libnvidia-ml share it. */
#define _GNU_SOURCE
#include "state_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef F_OFD_GETLK /* headers of glibc 2.17 are older than these kernel calls */
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define SLOT_OFFSET(slot) ((off_t)sizeof(struct state_header) + (off_t)(slot) * (off_t)sizeof(struct state_slot))

const char *state_dir(void)
{
    const char *dir = getenv("SOFTWARE_GPU_DIR");
    return dir && *dir ? dir : "/run/software-gpu";
}

static bool write_state_file(const char *path, uint64_t memory_bytes)
{
    struct state_header header = {.slots = STATE_SLOTS, .memory_bytes = memory_bytes};
    memcpy(header.magic, STATE_MAGIC, sizeof header.magic);
    int random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    bool ok = random >= 0 && read(random, header.uuid, sizeof header.uuid) == sizeof header.uuid;
    if (random >= 0) close(random);
    int fd = ok ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : -1;
    if (fd < 0) return false;
    fchmod(fd, 0666); /* containers with other users share the device */
    ok = write(fd, &header, sizeof header) == sizeof header && ftruncate(fd, SLOT_OFFSET(STATE_SLOTS)) == 0;
    close(fd);
    return ok;
}

/* Two processes may race here: each writes a private file and link() lets exactly one win. */
void state_make_from_environment(void)
{
    const char *count = getenv("SOFTWARE_GPU_COUNT"), *memory = getenv("SOFTWARE_GPU_MEMORY");
    struct stat seen;
    if (!count || stat(state_dir(), &seen) == 0) return;
    uint64_t bytes = memory ? strtoull(memory, NULL, 0) : 1ull << 30;
    int devices = atoi(count);
    mkdir(state_dir(), 0777);
    chmod(state_dir(), 0777);
    for (int n = 0; n < devices && n < MAX_DEVICES; n++) {
        char temporary[512], path[512];
        snprintf(temporary, sizeof temporary, "%s/.gpu%d.%d", state_dir(), n, (int)getpid());
        snprintf(path, sizeof path, "%s/gpu%d", state_dir(), n);
        if (write_state_file(temporary, bytes)) (void)!link(temporary, path);
        unlink(temporary);
    }
}

int state_open(int ordinal)
{
    char path[512];
    snprintf(path, sizeof path, "%s/gpu%d", state_dir(), ordinal);
    return open(path, O_RDWR | O_CLOEXEC);
}

int state_list(struct state_header headers[MAX_DEVICES])
{
    int n = 0;
    for (; n < MAX_DEVICES; n++) {
        int fd = state_open(n);
        if (fd < 0) break;
        bool ok = pread(fd, &headers[n], sizeof headers[n], 0) == sizeof headers[n] && !memcmp(headers[n].magic, STATE_MAGIC, 8);
        close(fd);
        if (!ok) break;
    }
    return n;
}

static struct flock slot_lock(int slot)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SLOT_OFFSET(slot), .l_len = 1};
}

int state_claim_slot(int fd)
{
    struct stat ns;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        struct flock lock = slot_lock(slot);
        if (fcntl(fd, F_OFD_SETLK, &lock) != 0) continue;
        struct state_slot mine = {.ns_pid = getpid()};
        if (stat("/proc/self/ns/pid", &ns) == 0) mine.pid_namespace = ns.st_ino;
        return pwrite(fd, &mine, sizeof mine, SLOT_OFFSET(slot)) == sizeof mine ? slot : -1;
    }
    return -1;
}

static bool slot_is_alive(int fd, int slot)
{
    struct flock lock = slot_lock(slot);
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

int state_owners(int fd, struct state_slot owners[STATE_SLOTS])
{
    static _Thread_local struct state_slot slots[STATE_SLOTS];
    int found = 0;
    if (pread(fd, slots, sizeof slots, SLOT_OFFSET(0)) != sizeof slots) return 0;
    for (int slot = 0; slot < STATE_SLOTS; slot++)
        if (slots[slot].ns_pid && slot_is_alive(fd, slot)) owners[found++] = slots[slot];
    return found;
}

uint64_t state_used(int fd, int own_slot)
{
    static _Thread_local struct state_slot slots[STATE_SLOTS];
    uint64_t used = 0;
    if (pread(fd, slots, sizeof slots, SLOT_OFFSET(0)) != sizeof slots) return UINT64_MAX;
    for (int slot = 0; slot < STATE_SLOTS; slot++)
        if (slots[slot].used_bytes && (slot == own_slot || slot_is_alive(fd, slot))) used += slots[slot].used_bytes;
    return used;
}

static bool write_used(int fd, int slot, uint64_t used)
{
    return pwrite(fd, &used, sizeof used, SLOT_OFFSET(slot)) == sizeof used;
}

/* Write first, count afterwards, take back when it does not fit: no lock that a stopped process could keep.
 * Two processes that ask at once may both be refused, so the refusal is tried again a few times. */
bool state_set_used(int fd, int slot, uint64_t old_used, uint64_t new_used, uint64_t total)
{
    for (int attempt = 0; attempt < 4; attempt++) {
        if (!write_used(fd, slot, new_used)) return false;
        if (new_used <= old_used || state_used(fd, slot) <= total) return true;
        write_used(fd, slot, old_used);
        struct timespec pause = {0, 200000 + (getpid() % 16) * 100000};
        nanosleep(&pause, NULL);
    }
    return false;
}

void uuid_text(const uint8_t u[16], char text[41])
{
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
             u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}
