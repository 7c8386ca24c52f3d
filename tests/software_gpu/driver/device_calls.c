/* cuDevice*: what a program asks about a device. */
#include <stdio.h>

#include "driver.h"

API(cuDeviceGetCount, (int *count), (count))
{
    NEED(count, CUDA_ERROR_INVALID_VALUE);
    *count = device_count;
    return CUDA_SUCCESS;
}

API(cuDeviceGet, (CUdevice *device, int ordinal), (device, ordinal))
{
    NEED(device, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

API(cuDeviceGetName, (char *name, int length, CUdevice device), (name, length, device))
{
    NEED(name && length > 0, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", DEVICE_NAME);
    return CUDA_SUCCESS;
}

API(cuDeviceGetUuid_v2, (CUuuid *uuid, CUdevice device), (uuid, device))
{
    NEED(uuid, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    memcpy(uuid->bytes, devices[device].uuid, 16);
    return CUDA_SUCCESS;
}

API(cuDeviceGetUuid, (CUuuid *uuid, CUdevice device), (uuid, device)) { return cuDeviceGetUuid_v2_body(uuid, device); }

API(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device), (bytes, device))
{
    NEED(bytes, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *bytes = devices[device].memory_bytes;
    return CUDA_SUCCESS;
}

API(cuDeviceComputeCapability, (int *major, int *minor, CUdevice device), (major, minor, device))
{
    NEED(major && minor, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *major = 9;
    *minor = 0;
    return CUDA_SUCCESS;
}

API(cuDeviceGetPCIBusId, (char *text, int length, CUdevice device), (text, length, device))
{
    NEED(text && length > 12, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02X:00.0", device + 1);
    return CUDA_SUCCESS;
}

API(cuDeviceGetByPCIBusId, (CUdevice *device, const char *text), (device, text))
{
    unsigned domain, bus;
    NEED(device && text && sscanf(text, "%x:%x:", &domain, &bus) == 2, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid((int)bus - 1), CUDA_ERROR_INVALID_DEVICE);
    *device = (int)bus - 1;
    return CUDA_SUCCESS;
}

API(cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer), (can, device, peer))
{
    NEED(can, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device) && device_is_valid(peer), CUDA_ERROR_INVALID_DEVICE);
    *can = device != peer;
    return CUDA_SUCCESS;
}

/* Attribute numbers are CUdevice_attribute; what is not listed is 0. */
static const struct { int attribute, value; } attributes[] = {
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536}, {10, 32},
    {11, 2147483647}, {12, 65536}, {13, 1000000}, {14, 512}, {15, 1}, {16, 4}, {19, 1}, {31, 1}, {34, 0}, {36, 1000000},
    {37, 64}, {38, 4194304}, {39, 2048}, {40, 2}, {41, 1}, {51, 32}, {75, 9}, {76, 0}, {78, 1}, {81, 65536}, {82, 65536},
    {83, 1}, {89, 1}, {91, 1}, {95, 1}, {97, 49152}, {99, 1}, {102, 1}, {103, 1}, {106, 32}, {115, 1},
};

API(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device), (value, attribute, device))
{
    NEED(value && attribute > 0, CUDA_ERROR_INVALID_VALUE);
    NEED(device_is_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *value = attribute == 33 ? device + 1 : 0; /* 33: PCI bus */
    for (size_t n = 0; n < sizeof attributes / sizeof *attributes; n++)
        if (attributes[n].attribute == attribute) *value = attributes[n].value;
    return CUDA_SUCCESS;
}
