/* Modules, libraries and functions: PTX text in, kernels by name out.
 *
 * Reads the `.entry` names and `.global` variables of the text, nothing else of it. Every entry must be a kernel this driver
 * knows (kernels.c), else the whole module is refused; ELF and fat binaries hold no code for this
 * device (209); anything else is an invalid image (200, as measured on the real driver).
 */
#include <ctype.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"

#define MODULE_MAGIC 0x656c75646f4d5753ull
#define FUNCTION_MAGIC 0x6e6f69746375ull
#define MAX_NAMES 32

struct CUfunc_st { uint64_t magic; const struct kernel *kernel; struct CUmod_st *module; };
struct global { char name[64]; size_t bytes; uint64_t address; };
struct CUmod_st {
    uint64_t magic;
    CUcontext context;
    struct CUfunc_st functions[MAX_NAMES];
    int function_count, global_count;
    struct global globals[MAX_NAMES];
    struct CUmod_st *next;
};
static CUmodule all_modules;

static const char *skip_space(const char *text)
{
    while (isspace((unsigned char)*text)) text++;
    return text;
}

static size_t name_length(const char *text)
{
    size_t length = 0;
    while (isalnum((unsigned char)text[length]) || text[length] == '_' || text[length] == '$') length++;
    return length;
}

static CUresult read_entries(CUmodule module, const char *ptx)
{
    for (const char *at = strstr(ptx, ".entry"); at; at = strstr(at, ".entry")) {
        at = skip_space(at + 6);
        const struct kernel *kernel = kernel_by_name(at, name_length(at));
        NEED(kernel && module->function_count < MAX_NAMES, CUDA_ERROR_INVALID_PTX);
        module->functions[module->function_count++] = (struct CUfunc_st){FUNCTION_MAGIC, kernel, module};
    }
    return CUDA_SUCCESS;
}

/* ".global .align 8 .b8 name[128];" or ".global .u64 name;" at the start of a line; instructions like ld.global do not match. */
static CUresult read_global(const char *declaration, struct global *out)
{
    size_t width = 1, count = 1;
    const char *at = skip_space(declaration);
    for (; *at == '.'; at = skip_space(at)) {
        size_t length = name_length(at + 1);
        const char *digits = at + 1 + strcspn(at + 1, "0123456789");
        if (digits < at + 1 + length) width = (size_t)atoi(digits) / 8;
        at = skip_space(at + 1 + length);
        if (length == 5) at = skip_space(at + strspn(at, "0123456789")); /* .align N */
    }
    size_t length = name_length(at);
    NEED(width && length && length < sizeof out->name, CUDA_ERROR_INVALID_PTX);
    if (at[length] == '[') count = (size_t)strtoul(at + length + 1, NULL, 0);
    memcpy(out->name, at, length);
    out->bytes = width * count;
    return out->bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
}

static CUresult read_globals(CUmodule module, const char *ptx)
{
    for (const char *at = strstr(ptx, ".global "); at; at = strstr(at + 1, ".global ")) {
        if (at > ptx && !isspace((unsigned char)at[-1])) continue;
        NEED(module->global_count < MAX_NAMES, CUDA_ERROR_INVALID_PTX);
        struct global *global = &module->globals[module->global_count];
        TRY(read_global(at + 7, global));
        TRY(memory_allocate(module->context, global->bytes, false, &global->address));
        module->global_count++;
    }
    return CUDA_SUCCESS;
}

static void module_free(CUmodule module)
{
    for (int n = 0; n < module->global_count; n++) memory_free_address(module->globals[n].address);
    module->magic = 0;
    free(module);
}

static bool is_ptx(const char *image)
{
    for (int n = 0; n < 8; n++)
        if (!image[n] || (!isprint((unsigned char)image[n]) && !isspace((unsigned char)image[n]))) return false;
    return strstr(image, ".version") != NULL;
}

static CUresult refuse_binary(const void *image)
{
    static const unsigned char fatbin[4] = {0x50, 0xed, 0x55, 0xba};
    bool is_binary = !memcmp(image, "\x7f" "ELF", 4) || !memcmp(image, fatbin, 4);
    return is_binary ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_ERROR_INVALID_IMAGE;
}

static CUresult module_load(CUmodule *out, const void *image)
{
    CUcontext context = context_current();
    NEED(out && image, CUDA_ERROR_INVALID_VALUE);
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    if (!is_ptx(image)) return refuse_binary(image);
    CUmodule module = calloc(1, sizeof *module);
    NEED(module, CUDA_ERROR_OUT_OF_MEMORY);
    module->magic = MODULE_MAGIC;
    module->context = context;
    CUresult rc = read_entries(module, image);
    if (rc == CUDA_SUCCESS) rc = read_globals(module, image);
    if (rc != CUDA_SUCCESS) {
        module_free(module);
        return rc;
    }
    pthread_mutex_lock(&driver_lock);
    module->next = all_modules;
    all_modules = module;
    pthread_mutex_unlock(&driver_lock);
    *out = module;
    return CUDA_SUCCESS;
}

static void unlink_module(CUmodule module)
{
    pthread_mutex_lock(&driver_lock);
    CUmodule *link = &all_modules;
    while (*link && *link != module) link = &(*link)->next;
    if (*link) *link = module->next;
    pthread_mutex_unlock(&driver_lock);
}

void module_free_context(CUcontext context)
{
    for (CUmodule module = all_modules, next; module; module = next) {
        next = module->next;
        if (module->context != context) continue;
        unlink_module(module);
        module_free(module);
    }
}

static bool is_module(CUmodule module) { return module && module->magic == MODULE_MAGIC; }
static bool is_function(CUfunction function) { return function && function->magic == FUNCTION_MAGIC; }

API(cuModuleLoadData, (CUmodule *out, const void *image), (out, image)) { return module_load(out, image); }

API(cuModuleLoadDataEx, (CUmodule *out, const void *image, unsigned count, int *options, void **values), (out, image, count, options, values))
{
    (void)count, (void)options, (void)values; /* compiler options: nothing is compiled */
    return module_load(out, image);
}

API(cuModuleLoad, (CUmodule *out, const char *path), (out, path))
{
    struct stat seen;
    NEED(out && path, CUDA_ERROR_INVALID_VALUE);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    NEED(fd >= 0 && fstat(fd, &seen) == 0, CUDA_ERROR_FILE_NOT_FOUND);
    char *image = calloc(1, (size_t)seen.st_size + 9); /* is_ptx looks at 8 bytes */
    CUresult rc = image && read(fd, image, (size_t)seen.st_size) == seen.st_size ? module_load(out, image) : CUDA_ERROR_OPERATING_SYSTEM;
    close(fd);
    free(image);
    return rc;
}

API(cuModuleUnload, (CUmodule module), (module))
{
    NEED(is_module(module), CUDA_ERROR_INVALID_HANDLE);
    stream_wait_context(module->context);
    unlink_module(module);
    module_free(module);
    return CUDA_SUCCESS;
}

static CUresult find_function(CUfunction *out, CUmodule module, const char *name)
{
    NEED(out && name, CUDA_ERROR_INVALID_VALUE);
    NEED(is_module(module), CUDA_ERROR_INVALID_HANDLE);
    for (int n = 0; n < module->function_count; n++)
        if (!strcmp(module->functions[n].kernel->name, name)) {
            *out = &module->functions[n];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult find_global(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
    NEED(name, CUDA_ERROR_INVALID_VALUE);
    NEED(is_module(module), CUDA_ERROR_INVALID_HANDLE);
    for (int n = 0; n < module->global_count; n++) {
        if (strcmp(module->globals[n].name, name) != 0) continue;
        if (address) *address = module->globals[n].address;
        if (bytes) *bytes = module->globals[n].bytes;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

API(cuModuleGetFunction, (CUfunction *out, CUmodule module, const char *name), (out, module, name)) { return find_function(out, module, name); }

API(cuModuleGetGlobal_v2, (CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name), (address, bytes, module, name))
{
    return find_global(address, bytes, module, name);
}

API(cuModuleGetFunctionCount, (unsigned *count, CUmodule module), (count, module))
{
    NEED(count && is_module(module), CUDA_ERROR_INVALID_VALUE);
    *count = (unsigned)module->function_count;
    return CUDA_SUCCESS;
}

API(cuModuleGetLoadingMode, (int *mode), (mode))
{
    NEED(mode, CUDA_ERROR_INVALID_VALUE);
    *mode = 1; /* eager */
    return CUDA_SUCCESS;
}

/* A library is a module of the current context here, a CUkernel the same thing as its CUfunction. */
API(cuLibraryLoadData, (CUlibrary *out, const void *code, int *jit, void **jit_values, unsigned jit_count, int *options, void **values, unsigned count),
    (out, code, jit, jit_values, jit_count, options, values, count))
{
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return module_load((CUmodule *)out, code);
}

API(cuLibraryUnload, (CUlibrary library), (library)) { return cuModuleUnload_body((CUmodule)library); }
API(cuLibraryGetKernel, (CUkernel *out, CUlibrary library, const char *name), (out, library, name)) { return find_function((CUfunction *)out, (CUmodule)library, name); }

API(cuLibraryGetModule, (CUmodule *out, CUlibrary library), (out, library))
{
    NEED(out && is_module((CUmodule)library), CUDA_ERROR_INVALID_VALUE);
    *out = (CUmodule)library;
    return CUDA_SUCCESS;
}

API(cuLibraryGetGlobal, (CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name), (address, bytes, library, name))
{
    return find_global(address, bytes, (CUmodule)library, name);
}

API(cuLibraryGetKernelCount, (unsigned *count, CUlibrary library), (count, library)) { return cuModuleGetFunctionCount_body(count, (CUmodule)library); }

API(cuKernelGetFunction, (CUfunction *out, CUkernel kernel), (out, kernel))
{
    NEED(out && is_function((CUfunction)kernel), CUDA_ERROR_INVALID_HANDLE);
    *out = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

/* Numbers are CUfunction_attribute. */
API(cuFuncGetAttribute, (int *value, int attribute, CUfunction function), (value, attribute, function))
{
    static const int values[] = {1024, 0, 0, 0, 16, 50, 90, 0, 49152};
    NEED(value && attribute >= 0 && attribute < 16, CUDA_ERROR_INVALID_VALUE);
    NEED(is_function(function), CUDA_ERROR_INVALID_HANDLE);
    *value = attribute < 9 ? values[attribute] : 0;
    return CUDA_SUCCESS;
}

API(cuFuncSetAttribute, (CUfunction function, int attribute, int value), (function, attribute, value))
{
    (void)attribute, (void)value; /* shared memory sizes: no kernel here has any */
    return is_function(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API(cuFuncGetModule, (CUmodule *out, CUfunction function), (out, function))
{
    NEED(out && is_function(function), CUDA_ERROR_INVALID_HANDLE);
    *out = function->module;
    return CUDA_SUCCESS;
}

API(cuFuncGetName, (const char **name, CUfunction function), (name, function))
{
    NEED(name && is_function(function), CUDA_ERROR_INVALID_HANDLE);
    *name = function->kernel->name;
    return CUDA_SUCCESS;
}

API(cuFuncGetParamInfo, (CUfunction function, size_t index, size_t *offset, size_t *size), (function, index, offset, size))
{
    NEED(is_function(function), CUDA_ERROR_INVALID_HANDLE);
    NEED(offset && index < (size_t)function->kernel->parameters, CUDA_ERROR_INVALID_VALUE);
    *offset = index * 8;
    if (size) *size = function->kernel->size[index];
    return CUDA_SUCCESS;
}

API(cuFuncLoad, (CUfunction function), (function)) { return is_function(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

API(cuFuncIsLoaded, (int *state, CUfunction function), (state, function))
{
    NEED(state && is_function(function), CUDA_ERROR_INVALID_HANDLE);
    *state = 1;
    return CUDA_SUCCESS;
}

API(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, CUfunction function, int block_size, size_t shared), (blocks, function, block_size, shared))
{
    (void)shared;
    NEED(blocks && block_size > 0, CUDA_ERROR_INVALID_VALUE);
    NEED(is_function(function), CUDA_ERROR_INVALID_HANDLE);
    *blocks = 2048 / block_size;
    return CUDA_SUCCESS;
}

/* Parameters come as one pointer each, or packed in a buffer named by {1, buffer, 2, &size, 0}. */
static CUresult read_parameters(const struct kernel *kernel, void **parameters, void **extra, struct kernel_args *args)
{
    const char *packed = NULL;
    if (!parameters && extra && extra[0] == (void *)1) packed = extra[1];
    NEED(parameters || packed, CUDA_ERROR_INVALID_VALUE);
    for (int n = 0; n < kernel->parameters; n++) memcpy(&args->value[n], packed ? packed + n * 8 : parameters[n], kernel->size[n]);
    return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, const unsigned shape[6], CUstream handle, void **parameters, void **extra)
{
    CUstream stream;
    NEED(is_function(function), CUDA_ERROR_INVALID_HANDLE);
    TRY(stream_resolve(handle, &stream));
    for (int n = 0; n < 6; n++) NEED(shape[n] > 0, CUDA_ERROR_INVALID_VALUE);
    NEED((uint64_t)shape[3] * shape[4] * shape[5] <= 1024, CUDA_ERROR_INVALID_VALUE);
    struct op op = {.kind = OP_KERNEL, .kernel = function->kernel};
    TRY(read_parameters(function->kernel, parameters, extra, &op.args));
    op.args.blocks = (uint64_t)shape[0] * shape[1] * shape[2];
    return stream_submit(stream, op, false);
}

API(cuLaunchKernel,
    (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra),
    (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra))
{
    (void)shared;
    return launch(function, (unsigned[]){gx, gy, gz, bx, by, bz}, stream, parameters, extra);
}

API(cuLaunchKernelEx, (const CUlaunchConfig *c, CUfunction function, void **parameters, void **extra), (c, function, parameters, extra))
{
    NEED(c, CUDA_ERROR_INVALID_VALUE);
    return launch(function, (unsigned[]){c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ}, c->hStream, parameters, extra);
}
