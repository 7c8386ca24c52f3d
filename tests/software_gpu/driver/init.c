/* cuInit, the driver's version, errors by name, and what a forked child is left with. */
#include <unistd.h>

#include "control.h"
#include "driver.h"

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static bool has_fork_handler;

/* As with the real driver a child of an initialised process cannot use CUDA. It must not keep the devices either: the
 * inherited descriptors carry the parent's slot locks. */
static void after_fork_in_child(void)
{
    gate_mark_forked();
    software_gpu_control.initialised = 0;
    if (gate_is_forked()) device_close_all();
}

static CUresult initialise(void)
{
    state_make_from_environment();
    TRY(device_open_all());
    if (!has_fork_handler && pthread_atfork(NULL, NULL, after_fork_in_child) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    has_fork_handler = true;
    TRY(control_start());
    gate_open_for_business();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned flags)
{
    NEED(flags == 0, CUDA_ERROR_INVALID_VALUE);
    NEED(!gate_is_forked(), CUDA_ERROR_NOT_INITIALIZED);
    pthread_mutex_lock(&init_lock);
    CUresult rc = gate_is_initialised() ? CUDA_SUCCESS : initialise();
    if (rc != CUDA_SUCCESS) device_close_all();
    pthread_mutex_unlock(&init_lock);
    return rc;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    NEED(version, CUDA_ERROR_INVALID_VALUE);
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

static const struct { CUresult code; const char *name, *text; } errors[] = {
#define ERROR(code, name, text) {code, name, text},
#include "errors.h"
#undef ERROR
};

static int error_index(CUresult code)
{
    for (size_t n = 0; n < sizeof errors / sizeof *errors; n++)
        if (errors[n].code == code) return (int)n;
    return -1;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name)
{
    NEED(name, CUDA_ERROR_INVALID_VALUE);
    int n = error_index(code);
    *name = n < 0 ? NULL : errors[n].name;
    return n < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text)
{
    NEED(text, CUDA_ERROR_INVALID_VALUE);
    int n = error_index(code);
    *text = n < 0 ? NULL : errors[n].text;
    return n < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
