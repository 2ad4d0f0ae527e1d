/* Virtual memory management: addresses that are reserved, memory that is mapped there and really unmapped, and copies. */
#include "stand_in.h"

#include <string.h>
#include <sys/mman.h>

#define GRANULE (2ull << 20)
#define GARBAGE 0x55 /* in memory that is new */

static bool is_whole(uint64_t number) { return number > 0 && number % GRANULE == 0; }

CUresult mem_granularity(size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    ENTER("cuMemGetAllocationGranularity");
    (void)option;
    *granularity = GRANULE;
    return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult mem_address_reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    ENTER("cuMemAddressReserve");
    if (!is_whole(size) || alignment != 0 || wanted != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    char *pages = mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    Span *range = made(RESERVATION, sizeof(Span));
    range->base = ((uint64_t)pages + GRANULE - 1) / GRANULE * GRANULE;
    range->size = size;
    *address = range->base;
    return CUDA_SUCCESS;
}

/* The living one of a kind that an address lies in. */
static Span *span_at(Kind kind, uint64_t address) {
    for (Object *object = newest(kind); object != NULL; object = object->before) {
        Span *span = (Span *)object;
        if (object->is_alive && address >= span->base && address < span->base + span->size) return span;
    }
    return NULL;
}

CUresult mem_address_free(CUdeviceptr address, size_t size) {
    ENTER("cuMemAddressFree");
    Span *range = span_at(RESERVATION, address);
    if (range == NULL || range->base != address || range->size != size) return CUDA_ERROR_INVALID_VALUE;
    for (Object *object = newest(MAPPING); object != NULL; object = object->before)
        if (object->is_alive && ((Span *)object)->base - address < size) return CUDA_ERROR_INVALID_VALUE;
    range->object.is_alive = false;
    return CUDA_SUCCESS;
}

CUresult mem_create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    ENTER("cuMemCreate");
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    if (!is_whole(size) || flags != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id != 0) return CUDA_ERROR_INVALID_VALUE;
    if (size > free_bytes(current_context())) return CUDA_ERROR_OUT_OF_MEMORY;
    Physical *memory = made(PHYSICAL, sizeof(Physical));
    memory->size = size;
    memory->references = 1;
    *handle = (CUmemGenericAllocationHandle)memory;
    return CUDA_SUCCESS;
}

static void dropped(Physical *memory) { memory->object.is_alive = --memory->references > 0; }

CUresult mem_release(CUmemGenericAllocationHandle handle) {
    ENTER("cuMemRelease");
    TAKE(Physical, memory, (void *)handle, PHYSICAL, CUDA_ERROR_INVALID_VALUE);
    dropped(memory);
    return CUDA_SUCCESS;
}

CUresult mem_map(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER("cuMemMap");
    TAKE(Physical, memory, (void *)handle, PHYSICAL, CUDA_ERROR_INVALID_VALUE);
    Span *range = span_at(RESERVATION, address);
    if (!is_whole(size) || offset != 0 || flags != 0 || memory->size != size) return CUDA_ERROR_INVALID_VALUE;
    if (range == NULL || address + size > range->base + range->size) return CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = address; at < address + size; at += GRANULE)
        if (span_at(MAPPING, at) != NULL) return CUDA_ERROR_INVALID_VALUE;
    Span *mapping = made(MAPPING, sizeof(Span));
    *mapping = (Span){mapping->object, address, size, memory, false};
    memory->references++;
    return CUDA_SUCCESS;
}

CUresult mem_set_access(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER("cuMemSetAccess");
    Span *mapping = span_at(MAPPING, address);
    if (mapping == NULL || mapping->base != address || mapping->size != size || count != 1) return CUDA_ERROR_INVALID_VALUE;
    if (access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || access->location.id != 0) return CUDA_ERROR_INVALID_VALUE;
    if (mprotect((void *)address, size, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_UNKNOWN;
    if (!mapping->has_access) memset((void *)address, GARBAGE, size);
    mapping->has_access = true;
    return CUDA_SUCCESS;
}

CUresult mem_unmap(CUdeviceptr address, size_t size) {
    ENTER("cuMemUnmap");
    Span *mapping = span_at(MAPPING, address);
    if (mapping == NULL || mapping->base != address || mapping->size != size) return CUDA_ERROR_INVALID_VALUE;
    run_all();
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapping->object.is_alive = false;
    dropped(mapping->memory);
    return CUDA_SUCCESS;
}

static bool reaches(uint64_t address, size_t size) {
    for (uint64_t end = address + size; address < end;) {
        Span *mapping = span_at(MAPPING, address);
        if (mapping == NULL || !mapping->has_access) return false;
        address = mapping->base + mapping->size;
    }
    return true;
}

static CUresult copied(uint64_t device, void *to, const void *from, size_t size) {
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    if (!reaches(device, size)) return CUDA_ERROR_INVALID_VALUE;
    run_all();
    memcpy(to, from, size);
    return CUDA_SUCCESS;
}

CUresult memcpy_to_host(void *to, CUdeviceptr from, size_t size) {
    ENTER("cuMemcpyDtoH");
    return copied(from, to, (void *)from, size);
}

CUresult memcpy_to_device(CUdeviceptr to, const void *from, size_t size) {
    ENTER("cuMemcpyHtoD");
    return copied(to, (void *)to, from, size);
}

CUresult memset_bytes(CUdeviceptr to, unsigned char value, size_t size) {
    ENTER("cuMemsetD8");
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    if (!reaches(to, size)) return CUDA_ERROR_INVALID_VALUE;
    run_all();
    memset((void *)to, value, size);
    return CUDA_SUCCESS;
}
