/* Devices, contexts, and memory of theirs; what was freed is kept, so that whoever touches it is found. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICE_BYTES (1ull << 30)
#define GARBAGE 0x55 /* in memory that was freed */
#define GUARD_BYTES 4096

extern int driver_version;
static Context *primary[DEVICES];
static __thread Context *current;

Context *current_context(void) { return current != NULL && current->object.is_alive ? current : NULL; }

CUresult driver_get_version(int *version) {
    ENTER("cuDriverGetVersion");
    *version = driver_version;
    return CUDA_SUCCESS;
}

CUresult init(unsigned flags) {
    ENTER("cuInit");
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult device_get(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet");
    *device = ordinal;
    return ordinal < DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult device_get_count(int *count) {
    ENTER("cuDeviceGetCount");
    *count = DEVICES;
    return CUDA_SUCCESS;
}

CUresult primary_context_retain(CUcontext *context, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain");
    if (device < 0 || device >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    if (primary[device] == NULL || known(primary[device], CONTEXT) == NULL) {
        primary[device] = made(CONTEXT, sizeof(Context));
        primary[device]->device = device;
        primary[device]->default_stream = made(STREAM, sizeof(Stream));
        primary[device]->default_stream->object.is_owned = true;
        primary[device]->default_stream->context = primary[device];
    }
    *context = primary[device];
    return CUDA_SUCCESS;
}

CUresult context_set_current(CUcontext context) {
    ENTER("cuCtxSetCurrent");
    if (context != NULL && living(context, CONTEXT, this_call) == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    current = context;
    return CUDA_SUCCESS;
}

CUresult context_get_current(CUcontext *context) {
    ENTER("cuCtxGetCurrent");
    *context = current_context();
    return CUDA_SUCCESS;
}

/* Allocating is not allowed in a thread that captures, unless it said so (cuThreadExchangeStreamCaptureMode). */
static CUresult allocate(void **base, size_t size, Context *context) {
    if (size == 0) return CUDA_ERROR_INVALID_VALUE;
    Capture *capture = forbids();
    if (capture != NULL) {
        capture->is_invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    size_t taken = (size + GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES;
    char *pages = mmap(NULL, taken + GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    mprotect(pages + taken, GUARD_BYTES, PROT_NONE);
    Memory *memory = made(MEMORY, sizeof(Memory));
    memory->context = context;
    memory->base = pages;
    memory->size = size;
    *base = pages;
    return CUDA_SUCCESS;
}

/* Bytes of a device that are free; the first one alone has memory without an address. */
size_t free_bytes(const Context *context) {
    size_t used = 0;
    for (Object *object = newest(PHYSICAL); object != NULL; object = object->before)
        if (object->is_alive && context->device == 0) used += ((Physical *)object)->size;
    for (Object *object = newest(MEMORY); object != NULL; object = object->before)
        if (object->is_alive && ((Memory *)object)->context == context)
            used += ((Memory *)object)->size;
    return DEVICE_BYTES - used;
}

CUresult mem_alloc(CUdeviceptr *address, size_t size) {
    ENTER("cuMemAlloc");
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    if (size > free_bytes(current_context())) return CUDA_ERROR_OUT_OF_MEMORY;
    return allocate((void **)address, size, current_context());
}

CUresult mem_host_alloc(void **address, size_t size, unsigned flags) {
    ENTER("cuMemHostAlloc");
    (void)flags;
    return allocate(address, size, NULL);
}

static CUresult freed(uint64_t address, bool is_pinned, const char *call) {
    Memory *memory = memory_at(address);
    if (memory != NULL && !memory->object.is_alive) complain("%s: %#lx was freed already", call, (unsigned long)address);
    if (memory == NULL || !memory->object.is_alive || (uint64_t)memory->base != address) return CUDA_ERROR_INVALID_VALUE;
    if ((memory->context == NULL) != is_pinned) return CUDA_ERROR_INVALID_VALUE;
    run_all(); /* as the driver does, which waits for all streams */
    memset(memory->base, GARBAGE, memory->size);
    memory->object.is_alive = false;
    return CUDA_SUCCESS;
}

CUresult mem_free(CUdeviceptr address) {
    ENTER("cuMemFree");
    return freed(address, false, this_call);
}

CUresult mem_free_host(void *address) {
    ENTER("cuMemFreeHost");
    return freed((uint64_t)address, true, this_call);
}

CUresult mem_get_info(size_t *available, size_t *total) {
    ENTER("cuMemGetInfo");
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    *total = DEVICE_BYTES;
    *available = free_bytes(current_context());
    return CUDA_SUCCESS;
}

/* The block that an address lies in; a living one where there are several, for the host gives addresses again. */
Memory *memory_at(uint64_t address) {
    Memory *found = NULL;
    for (Object *object = newest(MEMORY); object != NULL; object = object->before) {
        Memory *memory = (Memory *)object;
        uint64_t base = (uint64_t)memory->base;
        if (address < base || address >= base + memory->size) continue;
        if (memory->object.is_alive) return memory;
        if (found == NULL) found = memory;
    }
    return found;
}

void check_memory(uint64_t address, const char *who) {
    Memory *memory = memory_at(address);
    if (memory != NULL && !memory->object.is_alive) complain("%s: touches memory %u, which was freed", who, memory->object.number);
}

CUresult pointer_get_attribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER("cuPointerGetAttribute");
    Memory *memory = memory_at(address);
    if (memory == NULL || !memory->object.is_alive) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(CUmemorytype *)value = memory->context == NULL ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)value = memory->context == NULL ? 0 : memory->context->device;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}
