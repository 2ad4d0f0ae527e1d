/* Graphs made fit to launch, and what a launch does: nodes in any order that their edges allow. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

#define MOST_ROUNDS 100000 /* of a loop that does not end by itself */

static Exec *running;

Condition *condition_of(uint64_t handle) {
    for (Object *object = newest(CONDITION); object != NULL; object = object->before)
        if (((Condition *)object)->handle == handle) return (Condition *)object;
    return NULL;
}

static bool holds(const Graph *graph, const Condition *condition) {
    for (size_t i = 0; i < graph->num_nodes; i++) {
        const Node *node = graph->nodes[i];
        if (node->condition == condition || (node->child != NULL && holds(node->child, condition))) return true;
        for (unsigned body = 0; body < node->num_bodies; body++)
            if (holds(node->bodies[body], condition)) return true;
    }
    return false;
}

/* What a kernel on the device calls. */
void cudaGraphSetConditional(unsigned long long handle, unsigned value) {
    Condition *condition = condition_of(handle);
    if (condition == NULL || running == NULL || !holds(running->graph, condition))
        complain("cudaGraphSetConditional: %#llx is no condition of the graph that runs", handle);
    else
        condition->value = value;
}

static bool is_reachable(CUmemorytype type, uint64_t device, const void *host) {
    Memory *memory = memory_at(type == CU_MEMORYTYPE_HOST ? (uint64_t)host : device);
    return memory != NULL && memory->object.is_alive;
}

/* A body holds kernels of one context, fills, copies between memory of the device's and pinned memory, nothing, and
 * graphs of these. */
static CUresult body_checked(const Graph *graph, const Context *context) {
    for (size_t i = 0; i < graph->num_nodes; i++) {
        const Node *node = graph->nodes[i];
        CUresult error = CUDA_SUCCESS;
        switch (node->type) {
            case CU_GRAPH_NODE_TYPE_KERNEL:
                if (node->kernel.function->context != context) error = CUDA_ERROR_INVALID_VALUE;
                break;
            case CU_GRAPH_NODE_TYPE_MEMCPY:
                if (!is_reachable(node->copy.srcMemoryType, node->copy.srcDevice, node->copy.srcHost) ||
                    !is_reachable(node->copy.dstMemoryType, node->copy.dstDevice, node->copy.dstHost))
                    error = CUDA_ERROR_NOT_SUPPORTED;
                break;
            case CU_GRAPH_NODE_TYPE_MEMSET:
            case CU_GRAPH_NODE_TYPE_EMPTY:
                break;
            case CU_GRAPH_NODE_TYPE_GRAPH:
                error = body_checked(node->child, context);
                break;
            case CU_GRAPH_NODE_TYPE_CONDITIONAL:
                for (unsigned body = 0; body < node->num_bodies && error == CUDA_SUCCESS; body++)
                    error = body_checked(node->bodies[body], context);
                break;
            default:
                error = CUDA_ERROR_NOT_SUPPORTED;
        }
        if (error != CUDA_SUCCESS) return error;
    }
    return CUDA_SUCCESS;
}

static CUresult graph_checked(const Graph *graph) {
    for (size_t i = 0; i < graph->num_nodes; i++) {
        const Node *node = graph->nodes[i];
        for (unsigned body = 0; body < node->num_bodies; body++) {
            CUresult error = body_checked(node->bodies[body], node->condition->context);
            if (error != CUDA_SUCCESS) return error;
        }
    }
    return CUDA_SUCCESS;
}

CUresult graph_instantiate(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
    ENTER("cuGraphInstantiate");
    (void)flags;
    TAKE(Graph, graph, graph_handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    if (graph->parent != NULL) return CUDA_ERROR_INVALID_VALUE; /* a part of another one */
    for (Object *object = newest(CONDITION); object != NULL; object = object->before) {
        const Condition *condition = (const Condition *)object;
        if (object->is_alive && condition->graph == graph && condition->node == NULL)
            return CUDA_ERROR_INVALID_VALUE; /* a handle without a node */
    }
    CUresult error = graph_checked(graph);
    if (error != CUDA_SUCCESS) return error;
    Exec *exec = made(EXEC, sizeof(Exec));
    exec->graph = graph_copied(graph, NULL);
    exec->graph->object.is_owned = true;
    *handle = exec;
    return CUDA_SUCCESS;
}

CUresult graph_exec_destroy(CUgraphExec handle) {
    ENTER("cuGraphExecDestroy");
    TAKE(Exec, exec, handle, EXEC, CUDA_ERROR_INVALID_VALUE);
    exec->object.is_alive = false; /* what is under way comes to its end */
    graph_dies(exec->graph);
    return CUDA_SUCCESS;
}

CUresult graph_launch(CUgraphExec handle, CUstream stream_handle) {
    ENTER("cuGraphLaunch");
    TAKE(Exec, exec, handle, EXEC, CUDA_ERROR_INVALID_VALUE);
    Stream *stream = stream_of(stream_handle, this_call);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != NULL) {
        Node *child = node_made(stream->capture->graph, CU_GRAPH_NODE_TYPE_GRAPH, stream->tails, stream->num_tails);
        child->child = graph_copied(exec->graph, child);
        stream->tails[0] = child, stream->num_tails = 1;
        return CUDA_SUCCESS;
    }
    enqueued_exec(stream, exec);
    return CUDA_SUCCESS;
}

static char *side_of(CUmemorytype type, uint64_t device, const void *host, size_t x, size_t y, size_t z, size_t pitch, size_t height) {
    char *base = type == CU_MEMORYTYPE_HOST ? (char *)host : (char *)device;
    return base + (z * height + y) * pitch + x;
}

static void copy_run(const CUDA_MEMCPY3D *copy) {
    check_memory(copy->srcMemoryType == CU_MEMORYTYPE_HOST ? (uint64_t)copy->srcHost : copy->srcDevice, "memcpy");
    check_memory(copy->dstMemoryType == CU_MEMORYTYPE_HOST ? (uint64_t)copy->dstHost : copy->dstDevice, "memcpy");
    for (size_t z = 0; z < copy->Depth; z++)
        for (size_t y = 0; y < copy->Height; y++)
            memmove(side_of(copy->dstMemoryType, copy->dstDevice, copy->dstHost, copy->dstXInBytes, copy->dstY + y, copy->dstZ + z,
                            copy->dstPitch, copy->dstHeight),
                    side_of(copy->srcMemoryType, copy->srcDevice, copy->srcHost, copy->srcXInBytes, copy->srcY + y, copy->srcZ + z,
                            copy->srcPitch, copy->srcHeight),
                    copy->WidthInBytes);
}

static void fill_run(const CUDA_MEMSET_NODE_PARAMS *fill) {
    check_memory(fill->dst, "memset");
    for (size_t row = 0; row < fill->height; row++)
        for (size_t i = 0; i < fill->width; i++)
            memcpy((char *)fill->dst + row * fill->pitch + i * fill->elementSize, &fill->value, fill->elementSize);
}

static void graph_run(const Graph *graph) {
    bool done[graph->num_nodes + 1];
    memset(done, 0, sizeof done);
    for (size_t count = 0; count < graph->num_nodes; count++) {
        size_t chosen = graph->num_nodes, ready = 0;
        for (size_t i = 0; i < graph->num_nodes; i++) {
            bool may_run = !done[i];
            for (size_t j = 0; j < graph->nodes[i]->num_after && may_run; j++)
                for (size_t k = 0; k < i; k++)
                    if (graph->nodes[k] == graph->nodes[i]->after[j]) may_run = done[k];
            if (may_run && (ready++ == 0 || (is_lazy() && chance() < 1.0 / (double)ready))) chosen = i;
            if (!is_lazy() && ready > 0) break;
        }
        done[chosen] = true;
        node_run(graph->nodes[chosen]);
    }
}

static void condition_run(const Node *node) {
    const Condition *condition = node->condition;
    unsigned rounds = 0;
    if (node->condition_type == CU_GRAPH_COND_TYPE_WHILE) {
        while (condition->value != 0) {
            graph_run(node->bodies[0]);
            if (++rounds == MOST_ROUNDS) {
                complain("a WHILE node runs without an end");
                return;
            }
        }
        return;
    }
    unsigned chosen = node->condition_type == CU_GRAPH_COND_TYPE_IF ? condition->value == 0 : condition->value;
    if (chosen < node->num_bodies) graph_run(node->bodies[chosen]);
}

void node_run(Node *node) {
    switch (node->type) {
        case CU_GRAPH_NODE_TYPE_KERNEL: launch_run(&node->kernel); break;
        case CU_GRAPH_NODE_TYPE_MEMCPY: copy_run(&node->copy); break;
        case CU_GRAPH_NODE_TYPE_MEMSET: fill_run(&node->fill); break;
        case CU_GRAPH_NODE_TYPE_HOST: node->host.fn(node->host.userData); break;
        case CU_GRAPH_NODE_TYPE_GRAPH: graph_run(node->child); break;
        case CU_GRAPH_NODE_TYPE_CONDITIONAL: condition_run(node); break;
        case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
            node->event->mark = calloc(1, sizeof(Mark));
            node->event->mark->is_reached = true;
            break;
        default: break;
    }
}

static void assign_initial(const Graph *graph) {
    for (size_t i = 0; i < graph->num_nodes; i++) {
        Node *node = graph->nodes[i];
        if (node->condition != NULL && node->condition->flags & CU_GRAPH_COND_ASSIGN_DEFAULT) node->condition->value = node->condition->initial;
        for (unsigned body = 0; body < node->num_bodies; body++) assign_initial(node->bodies[body]);
    }
}

void exec_run(Exec *exec) {
    Exec *outer = running;
    running = exec;
    assign_initial(exec->graph);
    graph_run(exec->graph);
    running = outer;
}
