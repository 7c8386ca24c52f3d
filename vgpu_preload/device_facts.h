/* What the driver says about itself and its devices, asked right after cuInit and in the thread that called it.
 *
 * Later the driver may be locked for a checkpoint, and then every call blocks. So it is asked again only when memory was just given
 * back: a restore can have put other devices behind the process's own numbers.
 */
#ifndef VGPU_DEVICE_FACTS_H
#define VGPU_DEVICE_FACTS_H

#include "cuda_abi.h"

#define MOST_DEVICES 64

struct device_facts {
    int driver_version; /* as cuDriverGetVersion writes it, 13000 for 13.0; 0 when it did not answer */
    int device_count;
    struct {
        int ordinal;
        CUuuid uuid;
    } devices[MOST_DEVICES];
};

/* `driver_function` is any function of the driver library that was just initialised. */
void device_facts_gather(struct device_facts *facts, const void *driver_function);
/* Which devices these numbers mean now; what the driver does not tell stays. */
void device_facts_renew(struct device_facts *facts);

#endif
