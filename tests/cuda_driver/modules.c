/* Modules, functions, and what becomes of a launch's parameters. A device's code is the host's: an ELF of the host's. */
#define _GNU_SOURCE /* memfd_create */
#include "stand_in.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define WORD sizeof(uint64_t)
#define SHARED_UNASKED (48 << 10)
#define MOST_SHARED (227 << 10)
#define HOST_MACHINE_OF(header) ((header)->e_machine != 190) /* 190: EM_CUDA */

/* Bytes of an ELF image, whose length nobody tells: its table of sections ends it. */
static size_t image_bytes(const Elf64_Ehdr *header) {
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || !HOST_MACHINE_OF(header)) return 0;
    return header->e_shoff + (size_t)header->e_shentsize * header->e_shnum;
}

static CUresult loaded(Module **module, const void *image) {
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    size_t size = image_bytes(image);
    if (size == 0) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    int file = memfd_create("module", 0);
    char path[64];
    /* others load from descriptors too, and a name that was seen before is taken for the library it was */
    snprintf(path, sizeof path, "/proc/%d/task/%d/fd/%d", getpid(), getpid(), file);
    if (file < 0 || write(file, image, size) != (ssize_t)size) return CUDA_ERROR_OUT_OF_MEMORY;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        complain("a module was not loaded: %s", dlerror());
        close(file);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = made(MODULE, sizeof(Module));
    (*module)->context = current_context();
    (*module)->library = library;
    (*module)->file = file; /* stays open, or the next image would have the same name */
    return CUDA_SUCCESS;
}

CUresult module_load_data(CUmodule *handle, const void *image) {
    ENTER("cuModuleLoadData");
    return loaded((Module **)handle, image);
}

static CUresult function_in(Function **found, Module *module, const char *name) {
    void *body = dlsym(module->library, name);
    if (body == NULL) return CUDA_ERROR_NOT_FOUND;
    char table[300];
    snprintf(table, sizeof table, "%s_parameters", name);
    const unsigned *sizes = dlsym(module->library, table);
    Function *function = made(FUNCTION, sizeof(Function));
    function->object.is_owned = true; /* by its module */
    function->context = module->context;
    function->module = module;
    function->body = body;
    snprintf(function->name, sizeof function->name, "%s", name);
    while (sizes != NULL && sizes[function->num_parameters] != 0 && function->num_parameters < MOST_PARAMETERS) {
        function->sizes[function->num_parameters] = sizes[function->num_parameters];
        function->num_parameters++;
    }
    *found = function;
    return CUDA_SUCCESS;
}

CUresult module_get_function(CUfunction *function, CUmodule handle, const char *name) {
    ENTER("cuModuleGetFunction");
    TAKE(Module, module, handle, MODULE, CUDA_ERROR_INVALID_HANDLE);
    return function_in((Function **)function, module, name);
}

CUresult module_unload(CUmodule handle) {
    ENTER("cuModuleUnload");
    TAKE(Module, module, handle, MODULE, CUDA_ERROR_INVALID_HANDLE);
    if (is_under_way(module)) complain("cuModuleUnload: a kernel of module %u is under way", module->object.number);
    module->object.is_alive = false; /* its code stays mapped: whoever runs it is complained of, and does not crash */
    return CUDA_SUCCESS;
}

/* A kernel that the tests have, as a callback. Its handle serves as a CUfunction and as a CUkernel. */
void *stand_in_kernel(const char *name, void (*callback)(void **), const unsigned *sizes, unsigned count) {
    lock();
    int locked __attribute__((cleanup(unlock), unused)) = 1;
    Function *function = made(FUNCTION, sizeof(Function));
    function->object.is_owned = true;
    function->context = current_context();
    function->callback = callback;
    function->num_parameters = count;
    memcpy(function->sizes, sizes, count * sizeof *sizes);
    snprintf(function->name, sizeof function->name, "%s", name);
    return function;
}

static CUresult name_of(const char **name, const void *handle, const char *call) {
    Function *function = living(handle, FUNCTION, call);
    if (function == NULL) return CUDA_ERROR_INVALID_HANDLE;
    *name = function->name;
    return CUDA_SUCCESS;
}

CUresult function_get_name(const char **name, CUfunction handle) {
    ENTER("cuFuncGetName");
    return name_of(name, handle, this_call);
}

CUresult function_set_attribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    ENTER("cuFuncSetAttribute");
    TAKE(Function, function, handle, FUNCTION, CUDA_ERROR_INVALID_HANDLE);
    bool is_possible = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value >= 0 && value <= MOST_SHARED;
    if (!is_possible) return CUDA_ERROR_INVALID_VALUE;
    function->shared_bytes = (unsigned)value;
    return CUDA_SUCCESS;
}

CUresult kernel_get_name(const char **name, CUkernel handle) {
    ENTER("cuKernelGetName");
    return name_of(name, handle, this_call);
}

static CUresult parameter_of(const void *handle, size_t index, size_t *offset, size_t *size, const char *this_call) {
    TAKE(Function, function, handle, FUNCTION, CUDA_ERROR_INVALID_HANDLE);

    if (index >= function->num_parameters) return CUDA_ERROR_INVALID_VALUE;
    size_t begin = 0;
    for (size_t i = 0; i <= index; i++) {
        size_t alignment = function->sizes[i] < WORD ? function->sizes[i] : WORD;
        begin = (begin + alignment - 1) / alignment * alignment;
        *offset = begin;
        begin += function->sizes[i];
    }
    if (size != NULL) *size = function->sizes[index];
    return CUDA_SUCCESS;
}

CUresult function_get_parameter(CUfunction handle, size_t index, size_t *offset, size_t *size) {
    ENTER("cuFuncGetParamInfo");
    return parameter_of(handle, index, offset, size, this_call);
}

CUresult kernel_get_parameter(CUkernel handle, size_t index, size_t *offset, size_t *size) {
    ENTER("cuKernelGetParamInfo");
    return parameter_of(handle, index, offset, size, this_call);
}

static void copy_values(Launch *launch, void *const *values) {
    size_t words = 0;
    for (unsigned i = 0; i < launch->function->num_parameters; i++) words += (launch->function->sizes[i] + WORD - 1) / WORD;
    launch->words = calloc(words + 1, WORD);
    launch->values = calloc(launch->function->num_parameters + 1, sizeof *launch->values);
    uint64_t *place = launch->words;
    for (unsigned i = 0; i < launch->function->num_parameters; i++) {
        memcpy(place, values[i], launch->function->sizes[i]);
        launch->values[i] = place;
        place += (launch->function->sizes[i] + WORD - 1) / WORD;
    }
}

/* Take the values of a launch's parameters, as the driver does when it is told of them. */
bool launch_made(Launch *launch, Function *function, bool is_kernel, void **values) {
    launch->function = function;
    launch->is_kernel = is_kernel;
    if (function->num_parameters > 0 && values == NULL) return false;
    copy_values(launch, values);
    for (int i = 0; i < 3; i++)
        if (launch->grid[i] == 0 || launch->block[i] == 0) return false;
    unsigned shared = function->shared_bytes > SHARED_UNASKED ? function->shared_bytes : SHARED_UNASKED;
    if (launch->shared_bytes > shared || (launch->cluster > 0 && launch->grid[0] % launch->cluster != 0)) return false;
    return launch->grid[1] <= 65535 && launch->grid[2] <= 65535 &&
           (uint64_t)launch->block[0] * launch->block[1] * launch->block[2] <= 1024;
}

void launch_copied(Launch *to, const Launch *from) {
    *to = *from;
    copy_values(to, from->values);
}

void launch_run(const Launch *launch) {
    const Function *function = launch->function;
    if (function->module != NULL && !function->module->object.is_alive)
        complain("%s: runs after its module was unloaded", function->name);
    for (unsigned i = 0; i < function->num_parameters; i++)
        for (unsigned word = 0; word < function->sizes[i] / WORD; word++)
            check_memory(((uint64_t *)launch->values[i])[word], function->name);
    if (function->callback != NULL) {
        function->callback(launch->values);
        return;
    }
    uint64_t given[12] = {0};
    for (unsigned i = 0; i < function->num_parameters && i < 12; i++) memcpy(&given[i], launch->values[i], function->sizes[i]);
    /* numbers and pointers are passed alike, and a function takes no notice of more than it has */
    ((void (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
               uint64_t))function->body)(given[0], given[1], given[2], given[3], given[4], given[5], given[6], given[7],
                                         given[8], given[9], given[10], given[11]);
}
