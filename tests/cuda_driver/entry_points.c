/* The table that the bindings ask for their functions. What is not in it, this driver does not have. */
#include "stand_in.h"

#include <string.h>

typedef void (*Call)(void);

#define CALLS(X)                                                                                                              \
    X("cuInit", 2000, init)                                                                                                   \
    X("cuDriverGetVersion", 2020, driver_get_version)                                                                         \
    X("cuDeviceGet", 2000, device_get)                                                                                        \
    X("cuDeviceGetCount", 2000, device_get_count)                                                                             \
    X("cuDevicePrimaryCtxRetain", 7000, primary_context_retain)                                                               \
    X("cuCtxSetCurrent", 4000, context_set_current)                                                                           \
    X("cuCtxGetCurrent", 4000, context_get_current)                                                                           \
    X("cuCtxSynchronize", 2000, context_synchronize)                                                                          \
    X("cuMemAlloc", 3020, mem_alloc)                                                                                          \
    X("cuMemFree", 3020, mem_free)                                                                                            \
    X("cuMemHostAlloc", 2020, mem_host_alloc)                                                                                 \
    X("cuMemFreeHost", 2000, mem_free_host)                                                                                   \
    X("cuMemGetInfo", 3020, mem_get_info)                                                                                     \
    X("cuPointerGetAttribute", 4000, pointer_get_attribute)                                                                   \
    X("cuMemGetAllocationGranularity", 10020, mem_granularity)                                                                \
    X("cuMemAddressReserve", 10020, mem_address_reserve)                                                                      \
    X("cuMemAddressFree", 10020, mem_address_free)                                                                            \
    X("cuMemCreate", 10020, mem_create)                                                                                       \
    X("cuMemRelease", 10020, mem_release)                                                                                     \
    X("cuMemMap", 10020, mem_map)                                                                                             \
    X("cuMemSetAccess", 10020, mem_set_access)                                                                                \
    X("cuMemUnmap", 10020, mem_unmap)                                                                                         \
    X("cuMemcpyDtoH", 3020, memcpy_to_host)                                                                                   \
    X("cuMemcpyHtoD", 3020, memcpy_to_device)                                                                                 \
    X("cuMemsetD8", 3020, memset_bytes)                                                                                       \
    X("cuModuleLoadData", 2000, module_load_data)                                                                             \
    X("cuModuleGetFunction", 2000, module_get_function)                                                                       \
    X("cuModuleUnload", 2000, module_unload)                                                                                  \
    X("cuFuncGetName", 12030, function_get_name)                                                                              \
    X("cuKernelGetName", 12030, kernel_get_name)                                                                              \
    X("cuFuncGetParamInfo", 12040, function_get_parameter)                                                                    \
    X("cuKernelGetParamInfo", 12040, kernel_get_parameter)                                                                    \
    X("cuLaunchKernel", 4000, launch_kernel)                                                                                  \
    X("cuLaunchKernelEx", 11060, launch_kernel_with)                                                                          \
    X("cuFuncSetAttribute", 9000, function_set_attribute)                                                                     \
    X("cuLaunchHostFunc", 10000, launch_host)                                                                                 \
    X("cuMemcpyAsync", 4000, memcpy_async)                                                                                    \
    X("cuMemsetD32Async", 3020, memset_async)                                                                                 \
    X("cuStreamCreate", 2000, stream_create)                                                                                  \
    X("cuStreamDestroy", 4000, stream_destroy)                                                                                \
    X("cuStreamSynchronize", 2000, stream_synchronize)                                                                        \
    X("cuStreamWaitEvent", 3020, stream_wait_event)                                                                           \
    X("cuStreamBeginCapture", 10010, stream_begin_capture)                                                                    \
    X("cuStreamEndCapture", 10000, stream_end_capture)                                                                        \
    X("cuStreamIsCapturing", 10000, stream_is_capturing)                                                                      \
    X("cuThreadExchangeStreamCaptureMode", 10010, exchange_capture_mode)                                                      \
    X("cuEventCreate", 2000, event_create)                                                                                    \
    X("cuEventDestroy", 4000, event_destroy)                                                                                  \
    X("cuEventRecord", 2000, event_record)                                                                                    \
    X("cuEventSynchronize", 2000, event_synchronize)                                                                          \
    X("cuEventQuery", 2000, event_query)                                                                                      \
    X("cuGraphCreate", 10000, graph_create)                                                                                   \
    X("cuGraphDestroy", 10000, graph_destroy)                                                                                 \
    X("cuGraphAddKernelNode", 12000, add_kernel_node)                                                                         \
    X("cuGraphKernelNodeGetParams", 12000, kernel_node_get_params)                                                            \
    X("cuGraphAddMemcpyNode", 10000, add_memcpy_node)                                                                         \
    X("cuGraphMemcpyNodeGetParams", 10000, memcpy_node_get_params)                                                            \
    X("cuGraphAddMemsetNode", 10000, add_memset_node)                                                                         \
    X("cuGraphMemsetNodeGetParams", 10000, memset_node_get_params)                                                            \
    X("cuGraphAddHostNode", 10000, add_host_node)                                                                             \
    X("cuGraphAddEmptyNode", 10000, add_empty_node)                                                                           \
    X("cuGraphAddEventRecordNode", 11010, add_event_record_node)                                                              \
    X("cuGraphAddEventWaitNode", 11010, add_event_wait_node)                                                                  \
    X("cuGraphAddChildGraphNode", 10000, add_child_graph_node)                                                                \
    X("cuGraphChildGraphNodeGetGraph", 10000, child_graph_node_get_graph)                                                     \
    X("cuGraphConditionalHandleCreate", 12030, conditional_handle_create)                                                     \
    X("cuGraphAddNode", 12030, add_node)                                                                                      \
    X("cuGraphGetNodes", 10000, graph_get_nodes)                                                                              \
    X("cuGraphNodeGetType", 10000, node_get_type)                                                                             \
    X("cuGraphGetEdges", 12030, graph_get_edges)                                                                              \
    X("cuGraphInstantiate", 11040, graph_instantiate)                                                                         \
    X("cuGraphInstantiateWithFlags", 11040, graph_instantiate)                                                                \
    X("cuGraphExecDestroy", 10000, graph_exec_destroy)                                                                        \
    X("cuGraphLaunch", 10000, graph_launch)

#define DECLARE(name, since, function) CUresult function();
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
CALLS(DECLARE)

static const struct {
    const char *name;
    int since; /* the version of this form of the call */
    Call call;
} calls[] = {
#define ROW(name, since, function) {name, since, (Call)function},
    CALLS(ROW)};

CUresult cuGetProcAddress_v2(const char *name, void **found, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    (void)flags;
    *found = NULL;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(calls[i].name, name) == 0 && version == calls[i].since) *found = (void *)calls[i].call;
    if (strcmp(name, "cuGetProcAddress") == 0) *found = (void *)cuGetProcAddress_v2;
    if (status != NULL) *status = *found == NULL ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
    return *found == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
