/* A small libnvidia-ml.so.1 for tests: GPUs whose values, errors and events come from a shared file.
 *
 * The file, named by LOOM_TEST_NVML, is a `struct state`; `tests.support.nvml` has the same structure and writes it.
 * Without the variable there is no driver. A GPU instance (MIG) is a further entry of the list with a parent.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GPUS = 16, PROCESSES = 4 };
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };

struct process { uint64_t pid, memory, utilization; };

struct gpu {
    char uuid[64], name[64];
    uint64_t memory_total, memory_used, utilization, temperature, power, sm_clock, memory_clock, throttled;
    uint64_t ecc_corrected, ecc_uncorrected, process_count, lost, unlisted, unsupported;
    int64_t parent;
    uint64_t slice_id;
    uint64_t events, event_type, event_data, event_slice; /* the number of events so far, and the last one */
    struct process processes[PROCESSES];
};

struct state { uint64_t count, init_error, count_error; struct gpu gpus[GPUS]; };

/* Bits of `unsupported`. */
enum { UUID = 1, NAME = 2, MEMORY = 4, UTILIZATION = 8, TEMPERATURE = 16, POWER = 32, CLOCKS = 64, ECC = 128,
       THROTTLING = 256, PROCESS_LIST = 512, EVENTS = 1024 };

static volatile struct state *state;

int nvmlInitWithFlags(unsigned flags) {
    const char *path = getenv("LOOM_TEST_NVML");
    int file = path == NULL ? -1 : open(path, O_RDWR);
    (void)flags;
    if (file < 0) return DRIVER_NOT_LOADED;
    void *mapped = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return DRIVER_NOT_LOADED;
    state = mapped;
    return (int)state->init_error;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error) {
    switch (error) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

static int answers(volatile struct gpu *gpu, unsigned what) {
    if (gpu->lost || (gpu->parent >= 0 && state->gpus[gpu->parent].lost)) return GPU_IS_LOST;
    return gpu->unsupported & what ? NOT_SUPPORTED : SUCCESS;
}

#define ANSWER(gpu, what, statement) do { int no = answers(gpu, what); if (no) return no; statement; return SUCCESS; } while (0)

static int whole(volatile struct gpu *gpu) { return gpu->parent < 0 && !gpu->unlisted; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (state->count_error) return (int)state->count_error;
    *count = 0;
    for (unsigned place = 0; place < state->count; place++) *count += whole(&state->gpus[place]);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, volatile struct gpu **found) {
    for (unsigned place = 0; place < state->count; place++) {
        if (whole(&state->gpus[place]) && index-- == 0) ANSWER(&state->gpus[place], 0, *found = &state->gpus[place]);
    }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, volatile struct gpu **found) {
    for (unsigned place = 0; place < state->count; place++) {
        volatile struct gpu *gpu = &state->gpus[place];
        if (!gpu->unlisted && strcmp((const char *)gpu->uuid, uuid) == 0) ANSWER(gpu, 0, *found = gpu);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(volatile struct gpu *gpu, char *text, unsigned size) {
    ANSWER(gpu, UUID, strncpy(text, (const char *)gpu->uuid, size));
}

int nvmlDeviceGetName(volatile struct gpu *gpu, char *text, unsigned size) {
    ANSWER(gpu, NAME, strncpy(text, (const char *)gpu->name, size));
}

int nvmlDeviceGetMemoryInfo(volatile struct gpu *gpu, unsigned long long *memory) {
    ANSWER(gpu, MEMORY, (memory[0] = gpu->memory_total, memory[2] = gpu->memory_used, memory[1] = memory[0] - memory[2]));
}

int nvmlDeviceGetUtilizationRates(volatile struct gpu *gpu, unsigned *rates) {
    if (gpu->parent >= 0) return NOT_SUPPORTED;
    ANSWER(gpu, UTILIZATION, (rates[0] = gpu->utilization, rates[1] = 0));
}

int nvmlDeviceGetTemperature(volatile struct gpu *gpu, int sensor, unsigned *celsius) {
    if (gpu->parent >= 0 || sensor != 0) return NOT_SUPPORTED;
    ANSWER(gpu, TEMPERATURE, *celsius = gpu->temperature);
}

int nvmlDeviceGetPowerUsage(volatile struct gpu *gpu, unsigned *milliwatts) {
    if (gpu->parent >= 0) return NOT_SUPPORTED;
    ANSWER(gpu, POWER, *milliwatts = gpu->power);
}

int nvmlDeviceGetClockInfo(volatile struct gpu *gpu, int of, unsigned *megahertz) {
    if (gpu->parent >= 0) return NOT_SUPPORTED;
    ANSWER(gpu, CLOCKS, *megahertz = of == 1 ? gpu->sm_clock : gpu->memory_clock);
}

int nvmlDeviceGetTotalEccErrors(volatile struct gpu *gpu, int kind, int counter, unsigned long long *count) {
    if (counter != 0) return NOT_SUPPORTED;
    ANSWER(gpu, ECC, *count = kind == 1 ? gpu->ecc_uncorrected : gpu->ecc_corrected);
}

int nvmlDeviceGetCurrentClocksEventReasons(volatile struct gpu *gpu, unsigned long long *bits) {
    ANSWER(gpu, THROTTLING, *bits = gpu->throttled);
}

struct process_info { unsigned pid; unsigned long long memory; unsigned slice, compute; };

int nvmlDeviceGetComputeRunningProcesses_v3(volatile struct gpu *gpu, unsigned *count, struct process_info *list) {
    int no = answers(gpu, PROCESS_LIST);
    if (no) return no;
    unsigned room = *count;
    *count = gpu->process_count;
    if (room < gpu->process_count) return INSUFFICIENT_SIZE;
    for (unsigned place = 0; place < gpu->process_count; place++) {
        list[place] = (struct process_info){gpu->processes[place].pid, gpu->processes[place].memory, -1u, -1u};
    }
    return SUCCESS;
}

struct sample { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; };

int nvmlDeviceGetProcessUtilization(volatile struct gpu *gpu, struct sample *list, unsigned *count, unsigned long long since) {
    int no = answers(gpu, PROCESS_LIST);
    (void)since;
    if (no) return no;
    unsigned room = *count;
    *count = gpu->process_count;
    if (gpu->process_count == 0) return NOT_FOUND;
    if (list == NULL || room < gpu->process_count) return INSUFFICIENT_SIZE;
    for (unsigned place = 0; place < gpu->process_count; place++) {
        list[place] = (struct sample){gpu->processes[place].pid, 1, gpu->processes[place].utilization, 0, 0, 0};
    }
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(volatile struct gpu *gpu, unsigned *is) {
    *is = gpu->parent >= 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(volatile struct gpu *gpu, unsigned *id) {
    *id = gpu->slice_id;
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(volatile struct gpu *gpu, volatile struct gpu **found) {
    ANSWER(gpu, 0, *found = &state->gpus[gpu->parent]);
}

/* Events: a set remembers how many events of each GPU it has seen. */
struct event_set { uint64_t seen[GPUS]; uint64_t watched; };
struct event { volatile struct gpu *gpu; unsigned long long type, data; unsigned slice, compute; };

int nvmlEventSetCreate(struct event_set **set) {
    *set = calloc(1, sizeof(struct event_set));
    return SUCCESS;
}

int nvmlEventSetFree(struct event_set *set) {
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(volatile struct gpu *gpu, unsigned long long types, struct event_set *set) {
    unsigned place = gpu - state->gpus;
    (void)types;
    ANSWER(gpu, EVENTS, (set->watched |= 1u << place, set->seen[place] = gpu->events));
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout) {
    for (unsigned waited = 0;; waited += 2) {
        for (unsigned place = 0; place < state->count; place++) {
            volatile struct gpu *gpu = &state->gpus[place];
            if (!(set->watched & (1u << place)) || set->seen[place] == gpu->events) continue;
            set->seen[place] = gpu->events;
            *event = (struct event){gpu, gpu->event_type, gpu->event_data, gpu->event_slice, -1u};
            return SUCCESS;
        }
        if (waited >= timeout) return TIMEOUT;
        usleep(2000);
    }
}
