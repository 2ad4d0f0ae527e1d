/* Streams, events, and captures: what is queued runs late, in any order that streams and events allow. */
#include "stand_in.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static uint64_t this_thread(void) { return (uint64_t)pthread_self(); }

Stream *stream_of(CUstream handle, const char *call) {
    if (handle != NULL && handle != CU_STREAM_LEGACY) return living(handle, STREAM, call);
    return current_context() == NULL ? NULL : current_context()->default_stream;
}

/* The capture that forbids this thread what is not safe beside one; NULL if none does. */
Capture *forbids(void) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return NULL;
    for (Object *object = newest(STREAM); object != NULL; object = object->before) {
        Capture *capture = ((Stream *)object)->capture;
        if (capture == NULL || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
        bool is_own = capture->thread == this_thread();
        if (is_own || (capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) return capture;
    }
    return NULL;
}

static void queue(Stream *stream, Work work) {
    Work *queued = calloc(1, sizeof work);
    *queued = work;
    if (stream->first == NULL)
        stream->first = queued;
    else
        stream->last->next = queued;
    stream->last = queued;
}

static bool is_ready(const Stream *stream) {
    return stream->first != NULL && (stream->first->type != WAIT || stream->first->mark->is_reached);
}

static bool run_one(void) {
    Stream *chosen = NULL;
    unsigned ready = 0;
    for (Object *object = newest(STREAM); object != NULL; object = object->before)
        if (is_ready((Stream *)object) && (ready++ == 0 || (is_lazy() && chance() < 1.0 / ready))) chosen = (Stream *)object;
    if (chosen == NULL) return false;
    Work *work = chosen->first;
    chosen->first = work->next;
    switch (work->type) {
        case RUN_NODE: node_run(work->node); break;
        case RUN_EXEC:
            exec_run(work->exec);
            work->exec->under_way--;
            break;
        case REACH: work->mark->is_reached = true; break;
        case WAIT: break;
    }
    free(work);
    return true;
}

void run_all(void) {
    while (run_one()) continue;
}

static void go_on(void) {
    while (goes_on() && run_one()) continue;
}

static CUresult run_until(const Mark *mark, const char *call) {
    while (!mark->is_reached)
        if (!run_one()) {
            complain("%s: waits for what was never queued", call);
            return CUDA_ERROR_LAUNCH_FAILED;
        }
    return CUDA_SUCCESS;
}

static Mark *marked(Stream *stream) {
    Mark *mark = calloc(1, sizeof(Mark));
    queue(stream, (Work){.type = REACH, .mark = mark});
    return mark;
}

/* Queue what a node does; or, under capture, make it one of the graph's, behind what its stream did last. */
CUresult enqueued_node(Stream *stream, Node *node) {
    if (stream->capture != NULL) {
        Node *captured = node_made(stream->capture->graph, node->type, stream->tails, stream->num_tails);
        captured->kernel = node->kernel, captured->copy = node->copy, captured->fill = node->fill, captured->host = node->host;
        stream->tails[0] = captured, stream->num_tails = 1;
        return stream->capture->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    queue(stream, (Work){.type = RUN_NODE, .node = node});
    go_on();
    return CUDA_SUCCESS;
}

void enqueued_exec(Stream *stream, Exec *exec) {
    exec->under_way++;
    queue(stream, (Work){.type = RUN_EXEC, .exec = exec});
    go_on();
}

static bool uses(const Graph *graph, const Module *module) {
    for (size_t i = 0; i < graph->num_nodes; i++) {
        const Node *node = graph->nodes[i];
        if (node->kernel.function != NULL && node->kernel.function->module == module) return true;
        if (node->child != NULL && uses(node->child, module)) return true;
        for (unsigned body = 0; body < node->num_bodies; body++)
            if (uses(node->bodies[body], module)) return true;
    }
    return false;
}

bool is_under_way(const Module *module) {
    for (Object *object = newest(EXEC); object != NULL; object = object->before) {
        const Exec *exec = (const Exec *)object;
        if (exec->under_way > 0 && uses(exec->graph, module)) return true;
    }
    return false;
}

CUresult stream_create(CUstream *handle, unsigned flags) {
    ENTER("cuStreamCreate");
    if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    Stream *stream = made(STREAM, sizeof(Stream));
    stream->context = current_context();
    *handle = stream;
    return CUDA_SUCCESS;
}

CUresult stream_destroy(CUstream handle) {
    ENTER("cuStreamDestroy");
    TAKE(Stream, stream, handle, STREAM, CUDA_ERROR_INVALID_HANDLE);
    if (stream->object.is_owned) return CUDA_ERROR_INVALID_HANDLE;
    stream->object.is_alive = false; /* what it was given comes to its end */
    return CUDA_SUCCESS;
}

/* Waiting for what is only being captured spoils the capture. */
static CUresult waited(Capture *capture) {
    if (capture == NULL) return CUDA_SUCCESS;
    capture->is_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult stream_synchronize(CUstream handle) {
    ENTER("cuStreamSynchronize");
    Stream *stream = stream_of(handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    CUresult error = waited(stream->capture);
    return error == CUDA_SUCCESS ? run_until(marked(stream), this_call) : error;
}

CUresult context_synchronize(void) {
    ENTER("cuCtxSynchronize");
    for (Object *object = newest(STREAM); object != NULL; object = object->before) {
        Stream *stream = (Stream *)object;
        if (stream->capture != NULL && stream->context == current_context()) return waited(stream->capture);
    }
    run_all();
    return CUDA_SUCCESS;
}

CUresult event_create(CUevent *handle, unsigned flags) {
    ENTER("cuEventCreate");
    (void)flags;
    if (current_context() == NULL) return CUDA_ERROR_INVALID_CONTEXT;
    Event *event = made(EVENT, sizeof(Event));
    event->context = current_context();
    *handle = event;
    return CUDA_SUCCESS;
}

CUresult event_destroy(CUevent handle) {
    ENTER("cuEventDestroy");
    TAKE(Event, event, handle, EVENT, CUDA_ERROR_INVALID_HANDLE);
    event->object.is_alive = false;
    return CUDA_SUCCESS;
}

CUresult event_record(CUevent handle, CUstream stream_handle) {
    ENTER("cuEventRecord");
    TAKE(Event, event, handle, EVENT, CUDA_ERROR_INVALID_HANDLE);
    Stream *stream = stream_of(stream_handle, this_call);
    if (stream == NULL || stream->context != event->context) return CUDA_ERROR_INVALID_HANDLE;
    event->capture = stream->capture;
    if (stream->capture != NULL) {
        memcpy(event->tails, stream->tails, sizeof event->tails);
        event->num_tails = stream->num_tails;
    } else {
        event->mark = marked(stream);
        go_on();
    }
    return CUDA_SUCCESS;
}

CUresult event_synchronize(CUevent handle) {
    ENTER("cuEventSynchronize");
    TAKE(Event, event, handle, EVENT, CUDA_ERROR_INVALID_HANDLE);
    CUresult error = waited(event->capture);
    return error != CUDA_SUCCESS || event->mark == NULL ? error : run_until(event->mark, this_call);
}

CUresult event_query(CUevent handle) {
    ENTER("cuEventQuery");
    TAKE(Event, event, handle, EVENT, CUDA_ERROR_INVALID_HANDLE);
    CUresult error = waited(event->capture);
    if (error != CUDA_SUCCESS) return error;
    go_on();
    return event->mark == NULL || event->mark->is_reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult stream_wait_event(CUstream stream_handle, CUevent handle, unsigned flags) {
    ENTER("cuStreamWaitEvent");
    (void)flags;
    TAKE(Event, event, handle, EVENT, CUDA_ERROR_INVALID_HANDLE);
    Stream *stream = stream_of(stream_handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture == NULL) {
        if (stream->capture != NULL && event->mark != NULL) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        if (event->mark != NULL) queue(stream, (Work){.type = WAIT, .mark = event->mark});
        return CUDA_SUCCESS;
    }
    if (stream->capture != NULL && stream->capture != event->capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    stream->capture = event->capture; /* from now on this stream is captured too */
    for (size_t i = 0; i < event->num_tails && stream->num_tails < MOST_DEPENDENCIES; i++) {
        bool is_there = false;
        for (size_t j = 0; j < stream->num_tails; j++) is_there |= stream->tails[j] == event->tails[i];
        if (!is_there) stream->tails[stream->num_tails++] = event->tails[i];
    }
    return CUDA_SUCCESS;
}

CUresult stream_begin_capture(CUstream handle, CUstreamCaptureMode mode) {
    ENTER("cuStreamBeginCapture");
    Stream *stream = stream_of(handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->object.is_owned) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* the default stream */
    if (stream->capture != NULL) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = calloc(1, sizeof(Capture));
    *stream->capture = (Capture){.graph = graph_made(NULL), .origin = stream, .mode = mode, .thread = this_thread()};
    stream->num_tails = 0;
    return CUDA_SUCCESS;
}

static bool comes_behind(const Node *node, const Node *earlier) {
    if (node == earlier) return true;
    for (size_t i = 0; i < node->num_after; i++)
        if (comes_behind(node->after[i], earlier)) return true;
    return false;
}

/* End a capture for all its streams; whether each of the others had come back to the first. */
static bool left_by_all(const Capture *capture) {
    bool is_joined = true;
    for (Object *object = newest(STREAM); object != NULL; object = object->before) {
        Stream *stream = (Stream *)object;
        if (stream->capture != capture) continue;
        for (size_t i = 0; i < stream->num_tails && stream != capture->origin; i++) {
            bool is_back = false;
            for (size_t j = 0; j < capture->origin->num_tails && !is_back; j++)
                is_back = comes_behind(capture->origin->tails[j], stream->tails[i]);
            is_joined &= is_back;
        }
    }
    for (Object *object = newest(STREAM); object != NULL; object = object->before)
        if (((Stream *)object)->capture == capture) ((Stream *)object)->capture = NULL, ((Stream *)object)->num_tails = 0;
    for (Object *object = newest(EVENT); object != NULL; object = object->before)
        if (((Event *)object)->capture == capture) ((Event *)object)->capture = NULL;
    return is_joined;
}

CUresult stream_end_capture(CUstream handle, CUgraph *graph) {
    ENTER("cuStreamEndCapture");
    *graph = NULL;
    Stream *stream = stream_of(handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    Capture *capture = stream->capture;
    if (capture == NULL) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != this_thread()) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    bool is_joined = left_by_all(capture);
    if (capture->is_invalid || !is_joined) {
        graph_dies(capture->graph);
        return capture->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    *graph = capture->graph;
    return CUDA_SUCCESS;
}

CUresult stream_is_capturing(CUstream handle, CUstreamCaptureStatus *status) {
    ENTER("cuStreamIsCapturing");
    Stream *stream = stream_of(handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    *status = stream->capture == NULL         ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                            : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult exchange_capture_mode(CUstreamCaptureMode *mode) {
    ENTER("cuThreadExchangeStreamCaptureMode");
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* What is queued by itself: kernels, copies and fills. */

static Node *alone(CUgraphNodeType type) {
    Node *node = made(NODE, sizeof(Node));
    node->object.is_owned = true;
    node->type = type;
    return node;
}

static CUresult launched(const char *this_call, CUfunction handle, CUstream stream_handle, Launch launch, void **values) {
    TAKE(Function, function, handle, FUNCTION, CUDA_ERROR_INVALID_HANDLE);
    Stream *stream = stream_of(stream_handle, this_call);
    if (stream == NULL || stream->context != function->context) return CUDA_ERROR_INVALID_HANDLE;
    if (function->module != NULL && !function->module->object.is_alive) {
        complain("%s: the module of %s was unloaded", this_call, function->name);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    Node *node = alone(CU_GRAPH_NODE_TYPE_KERNEL);
    node->kernel = launch;
    if (!launch_made(&node->kernel, function, false, values)) return CUDA_ERROR_INVALID_VALUE;
    return enqueued_node(stream, node);
}

CUresult launch_kernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                       unsigned block_z, unsigned shared_bytes, CUstream stream, void **values, void **extra) {
    ENTER("cuLaunchKernel");
    (void)extra;
    Launch launch = {.grid = {grid_x, grid_y, grid_z}, .block = {block_x, block_y, block_z}, .shared_bytes = shared_bytes};
    return launched(this_call, handle, stream, launch, values);
}

CUresult launch_kernel_with(const CUlaunchConfig *config, CUfunction handle, void **values, void **extra) {
    ENTER("cuLaunchKernelEx");
    (void)extra;
    Launch launch = {.grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                     .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
                     .shared_bytes = config->sharedMemBytes};
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *given = &config->attrs[i];
        if (given->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            launch.starts_early = given->value.programmaticStreamSerializationAllowed != 0;
        else if (given->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION && given->value.clusterDim.y == 1 && given->value.clusterDim.z == 1)
            launch.cluster = given->value.clusterDim.x;
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    return launched(this_call, handle, config->hStream, launch, values);
}

CUresult launch_host(CUstream stream_handle, CUhostFn function, void *data) {
    ENTER("cuLaunchHostFunc");
    Stream *stream = stream_of(stream_handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    Node *node = alone(CU_GRAPH_NODE_TYPE_HOST);
    node->host = (CUDA_HOST_NODE_PARAMS){.fn = function, .userData = data};
    return enqueued_node(stream, node);
}

static CUmemorytype type_at(uint64_t address) {
    Memory *memory = memory_at(address);
    return memory == NULL || memory->context == NULL ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

CUresult memcpy_async(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream_handle) {
    ENTER("cuMemcpyAsync");
    Stream *stream = stream_of(stream_handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    Node *node = alone(CU_GRAPH_NODE_TYPE_MEMCPY);
    CUDA_MEMCPY3D *copy = &node->copy;
    copy->WidthInBytes = size, copy->Height = copy->Depth = 1;
    copy->srcMemoryType = type_at(from), copy->dstMemoryType = type_at(to);
    copy->srcPitch = copy->dstPitch = size, copy->srcHeight = copy->dstHeight = 1;
    copy->srcDevice = from, copy->srcHost = (void *)from, copy->dstDevice = to, copy->dstHost = (void *)to;
    if (size == 0) return CUDA_SUCCESS;
    bool is_pageable = memory_at(from) == NULL || memory_at(to) == NULL;
    if (is_pageable && stream->capture != NULL) return waited(stream->capture);
    CUresult error = enqueued_node(stream, node);
    return error == CUDA_SUCCESS && is_pageable ? run_until(marked(stream), this_call) : error;
}

CUresult memset_async(CUdeviceptr address, unsigned value, size_t count, CUstream stream_handle) {
    ENTER("cuMemsetD32Async");
    Stream *stream = stream_of(stream_handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    Memory *memory = memory_at(address);
    if (memory == NULL || !memory->object.is_alive || count == 0) return CUDA_ERROR_INVALID_VALUE;
    Node *node = alone(CU_GRAPH_NODE_TYPE_MEMSET);
    node->fill = (CUDA_MEMSET_NODE_PARAMS){.dst = address, .value = value, .elementSize = 4, .width = count, .height = 1};
    return enqueued_node(stream, node);
}
