/* The driver thread: answers lock, checkpoint, restore and unlock asked for through the control block (control.h).
 *
 * It needs no other thread of the process to run while it saves and restores. An injected fault is read from
 * $SOFTWARE_GPU_DIR/fault-{lock,checkpoint,restore,unlock}: "CODE [DELAY_MS]"; the file is consumed, the state stays as it was.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "control.h"
#include "driver.h"

EXPORT struct control_block software_gpu_control __attribute__((aligned(CONTROL_ALIGNMENT))) = {
    .magic = {'S', 'o', 'f', 't', 'w', 'a', 'r', 'e', 'G', 'P', 'U', '\0', 'c', 't', 'l', '1'},
    .layout = CONTROL_LAYOUT,
    .size = sizeof software_gpu_control,
};
#define control software_gpu_control

static void sleep_ms(unsigned milliseconds)
{
    struct timespec pause = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    nanosleep(&pause, NULL);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ll + now.tv_nsec / 1000000;
}

static uint32_t current_request(void) { return __atomic_load_n(&control.request_number, __ATOMIC_ACQUIRE); }

/* Only a process that runs tells its state (measured). */
static void tell_state(void)
{
    __atomic_store_n(&control.told_number, __atomic_load_n(&control.question_number, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
}

static void pause_1_ms(void)
{
    tell_state();
    sleep_ms(1);
}

/* A newer request means that the caller of this one is gone: the lock is given up for it. */
static CUresult lock(uint32_t timeout_ms, uint32_t request)
{
    int64_t start = now_ms();
    gate_close();
    while (!gate_is_quiet() || !stream_all_idle()) {
        bool is_late = timeout_ms && now_ms() - start >= timeout_ms;
        if (is_late || current_request() != request) {
            gate_reopen();
            return CUDA_ERROR_NOT_READY;
        }
        pause_1_ms();
    }
    control.state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

static CUresult checkpoint(void)
{
    NEED(!save_has_managed(), CUDA_ERROR_NOT_SUPPORTED);
    TRY(save_memory());
    control.state = CU_PROCESS_STATE_CHECKPOINTED;
    return CUDA_SUCCESS;
}

/* As measured on the real driver: imported memory lets itself be checkpointed, and then the process cannot be saved any more.
 * It holds the devices again, and its state stays checkpointed. */
static CUresult refuse_imports(const struct control_request *request)
{
    if (!device_is_any_open()) TRY(device_rebind(request->pairs, request->pair_count));
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* As measured on the real driver: host memory of cuMemCreate lets itself be checkpointed, and its process is lost at the restore. */
static CUresult lose(void)
{
    control.state = CU_PROCESS_STATE_FAILED;
    return CUDA_ERROR_UNKNOWN;
}

static CUresult restore(const struct control_request *request)
{
    if (vmm_has_host()) return lose();
    if (vmm_has_imports()) return refuse_imports(request);
    CUresult rc = restore_memory(request->pairs, request->pair_count);
    if (rc == CUDA_SUCCESS) control.state = CU_PROCESS_STATE_LOCKED;
    if (rc == CUDA_ERROR_OPERATING_SYSTEM) control.state = CU_PROCESS_STATE_FAILED;
    return rc;
}

static CUresult unlock(void)
{
    control.state = CU_PROCESS_STATE_RUNNING;
    gate_reopen();
    return CUDA_SUCCESS;
}

static CUresult injected_fault(const char *command)
{
    char path[512], text[32] = "";
    int code = 0;
    unsigned delay_ms = 0;
    snprintf(path, sizeof path, "%s/fault-%s", state_dir(), command);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return CUDA_SUCCESS;
    (void)!read(fd, text, sizeof text - 1);
    close(fd);
    unlink(path);
    sscanf(text, "%d %u", &code, &delay_ms);
    for (unsigned passed = 0; passed < delay_ms; passed++) pause_1_ms();
    return code;
}

static CUresult answer(const struct control_request *request, uint32_t number)
{
    static const struct { const char *name; CUprocessState needed; } rules[] = {
        [COMMAND_LOCK] = {"lock", CU_PROCESS_STATE_RUNNING},
        [COMMAND_CHECKPOINT] = {"checkpoint", CU_PROCESS_STATE_LOCKED},
        [COMMAND_RESTORE] = {"restore", CU_PROCESS_STATE_CHECKPOINTED},
        [COMMAND_UNLOCK] = {"unlock", CU_PROCESS_STATE_LOCKED},
    };
    NEED(request->command >= COMMAND_LOCK && request->command <= COMMAND_UNLOCK && request->pair_count <= MAX_DEVICES, CUDA_ERROR_INVALID_VALUE);
    NEED((int)rules[request->command].needed == control.state, CUDA_ERROR_ILLEGAL_STATE);
    TRY(injected_fault(rules[request->command].name));
    switch (request->command) {
    case COMMAND_LOCK: return lock(request->timeout_ms, number);
    case COMMAND_CHECKPOINT: return checkpoint();
    case COMMAND_RESTORE: return restore(request);
    default: return unlock();
    }
}

static void *driver_thread(void *unused)
{
    static struct control_request request;
    (void)unused;
    __atomic_store_n(&control.ns_driver_tid, (int)syscall(SYS_gettid), __ATOMIC_RELEASE);
    for (uint32_t done = current_request();;) {
        pause_1_ms();
        uint32_t number = current_request();
        if (number == done) continue;
        request = control.request;
        control.result = answer(&request, number);
        done = number;
        __atomic_store_n(&control.answer_number, number, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* Signals of the application must not land on the driver's thread. */
CUresult control_start(void)
{
    pthread_t thread;
    sigset_t all, before;
    control.ns_pid = getpid();
    control.state = CU_PROCESS_STATE_RUNNING;
    control.ns_driver_tid = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool ok = pthread_create(&thread, NULL, driver_thread, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    NEED(ok, CUDA_ERROR_OUT_OF_MEMORY);
    pthread_detach(thread);
    while (!__atomic_load_n(&control.ns_driver_tid, __ATOMIC_ACQUIRE)) sleep_ms(1);
    __atomic_store_n(&control.initialised, 1, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}
