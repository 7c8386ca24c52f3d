/* Device state files: who uses how much of which software GPU.
 *
 * $SOFTWARE_GPU_DIR/gpuN = one header, then STATE_SLOTS slots. A process owns a slot while it holds an open-file-description
 * lock on the slot's first byte; the kernel drops that lock when the process dies, so its memory counts as free again.
 * tests/software_gpu/devices.py writes the same layout.
 */
#ifndef STATE_FILE_H
#define STATE_FILE_H

#include <stdbool.h>
#include <stdint.h>

#define STATE_MAGIC "SWGPUST1"
#define STATE_SLOTS 256
#define MAX_DEVICES 16
#define DEVICE_NAME "Software GPU (test double)"
#define DRIVER_RELEASE "580.0-software"
#define DRIVER_VERSION 13000

struct state_header {
    char magic[8];
    uint32_t slots;
    uint32_t reserved0;
    uint8_t uuid[16];
    uint64_t memory_bytes;
    uint8_t reserved[24];
};

struct state_slot {
    uint64_t used_bytes;
    uint64_t pid_namespace; /* inode of the owner's /proc/self/ns/pid: a host can translate ns_pid */
    int32_t ns_pid;
    uint32_t reserved0;
    uint64_t reserved[5];
};

/* Makes the directory from SOFTWARE_GPU_COUNT and SOFTWARE_GPU_MEMORY where it is absent. */
void state_make_from_environment(void);
/* Number of devices; fills headers[0..n). */
int state_list(struct state_header headers[MAX_DEVICES]);
int state_open(int ordinal); /* fd or -1 */
int state_claim_slot(int fd); /* slot or -1 */
/* Sets this process's use to new_used unless the device then holds more than total. */
bool state_set_used(int fd, int slot, uint64_t old_used, uint64_t new_used, uint64_t total);
uint64_t state_used(int fd, int own_slot);
/* Owners of live slots. */
int state_owners(int fd, struct state_slot owners[STATE_SLOTS]);
void uuid_text(const uint8_t uuid[16], char text[41]); /* "GPU-xxxxxxxx-..." */
const char *state_dir(void);

#endif
