#include "device_facts.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "loaded_objects.h"

typedef CUresult get_int(int *value);
typedef CUresult get_device(CUdevice *device, int ordinal);
typedef CUresult get_uuid(CUuuid *uuid, CUdevice device);

static get_device *device_get;
static get_uuid *device_uuid;

/* The library whose cuInit ran, or whoever defines the call where that was only an interposer. */
static void *driver_symbol(const void *driver_function, const char *name)
{
    void *symbol = loaded_beside(driver_function, name);
    return symbol != NULL ? symbol : loaded_next(name);
}

static get_uuid *uuid_call(const void *driver_function)
{
    /* The second version tells MIG instances apart; drivers before 11.4 have only the first. */
    get_uuid *call = (get_uuid *)driver_symbol(driver_function, "cuDeviceGetUuid_v2");
    return call != NULL ? call : (get_uuid *)driver_symbol(driver_function, "cuDeviceGetUuid");
}

void device_facts_gather(struct device_facts *facts, const void *driver_function)
{
    get_int *get_version = (get_int *)driver_symbol(driver_function, "cuDriverGetVersion");
    get_int *get_count = (get_int *)driver_symbol(driver_function, "cuDeviceGetCount");
    device_get = (get_device *)driver_symbol(driver_function, "cuDeviceGet");
    device_uuid = uuid_call(driver_function);

    memset(facts, 0, sizeof *facts);
    if (get_version != NULL && get_version(&facts->driver_version) != CUDA_SUCCESS) facts->driver_version = 0;
    if (get_count == NULL || device_get == NULL || device_uuid == NULL) return;

    int count = 0;
    if (get_count(&count) != CUDA_SUCCESS) return;
    for (int ordinal = 0; ordinal < count && facts->device_count < MOST_DEVICES; ordinal++) {
        CUdevice device;
        CUuuid *uuid = &facts->devices[facts->device_count].uuid;
        if (device_get(&device, ordinal) != CUDA_SUCCESS || device_uuid(uuid, device) != CUDA_SUCCESS) continue;
        facts->devices[facts->device_count++].ordinal = ordinal;
    }
}

void device_facts_renew(struct device_facts *facts)
{
    for (int n = 0; n < facts->device_count; n++) {
        CUdevice device;
        CUuuid uuid;
        bool is_told = device_get(&device, facts->devices[n].ordinal) == CUDA_SUCCESS && device_uuid(&uuid, device) == CUDA_SUCCESS;
        if (is_told) facts->devices[n].uuid = uuid;
    }
}
