/* Graphs and their nodes: built by hand, copied into others, looked at, destroyed. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

Graph *graph_made(Node *parent) {
    Graph *graph = made(GRAPH, sizeof(Graph));
    graph->parent = parent;
    graph->object.is_owned = parent != NULL;
    return graph;
}

/* The outermost graph that one is a part of. */
static Graph *root_of(Graph *graph) {
    while (graph->parent != NULL) graph = graph->parent->graph;
    return graph;
}

Node *node_made(Graph *graph, CUgraphNodeType type, Node *const *after, size_t num_after) {
    Node *node = made(NODE, sizeof(Node));
    node->object.is_owned = true;
    node->graph = graph;
    node->type = type;
    node->after = calloc(num_after + 1, sizeof *node->after);
    if (num_after > 0) memcpy(node->after, after, num_after * sizeof *after);
    node->num_after = num_after;
    if (graph->num_nodes == graph->room) {
        graph->room = graph->room == 0 ? 8 : 2 * graph->room;
        graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
    }
    graph->nodes[graph->num_nodes++] = node;
    return node;
}

/* Add a node behind others of the same graph, each named once. */
static CUresult added(Node **node, CUgraph handle, CUgraphNodeType type, const CUgraphNode *after, size_t count, const char *this_call) {
    TAKE(Graph, graph, handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    if (count > 0 && after == NULL) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        TAKE(Node, earlier, after[i], NODE, CUDA_ERROR_INVALID_VALUE);
        if (earlier->graph != graph) return CUDA_ERROR_INVALID_VALUE;
        for (size_t j = 0; j < i; j++)
            if (after[j] == after[i]) return CUDA_ERROR_INVALID_VALUE;
    }
    *node = node_made(graph, type, after, count);
    return CUDA_SUCCESS;
}

/* A node that could not be made is none; it is the last one. */
static CUresult taken_back(Node *node, CUresult error) {
    node->graph->num_nodes--;
    node->object.is_alive = false;
    return error;
}

CUresult graph_create(CUgraph *graph, unsigned flags) {
    ENTER("cuGraphCreate");
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    *graph = graph_made(NULL);
    return CUDA_SUCCESS;
}

void graph_dies(Graph *graph) {
    graph->object.is_alive = false;
    for (size_t i = 0; i < graph->num_nodes; i++) {
        Node *node = graph->nodes[i];
        node->object.is_alive = false;
        if (node->child != NULL) graph_dies(node->child);
        for (unsigned body = 0; body < node->num_bodies; body++) graph_dies(node->bodies[body]);
    }
    for (Object *object = newest(CONDITION); object != NULL; object = object->before)
        if (((Condition *)object)->graph == graph) object->is_alive = false;
}

CUresult graph_destroy(CUgraph handle) {
    ENTER("cuGraphDestroy");
    TAKE(Graph, graph, handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    if (graph->object.is_owned) {
        complain("cuGraphDestroy: graph %u belongs to a node", graph->object.number);
        return CUDA_ERROR_INVALID_VALUE;
    }
    graph_dies(graph);
    return CUDA_SUCCESS;
}

CUresult add_kernel_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const CUDA_KERNEL_NODE_PARAMS *given) {
    ENTER("cuGraphAddKernelNode");
    bool is_kernel = given->func == NULL;
    TAKE(Function, function, is_kernel ? (void *)given->kern : (void *)given->func, FUNCTION, CUDA_ERROR_INVALID_HANDLE);
    if (function->module != NULL && !function->module->object.is_alive) {
        complain("cuGraphAddKernelNode: the module of %s was unloaded", function->name);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult error = added(node, graph, CU_GRAPH_NODE_TYPE_KERNEL, after, count, this_call);
    if (error != CUDA_SUCCESS) return error;
    (*node)->kernel = (Launch){.grid = {given->gridDimX, given->gridDimY, given->gridDimZ},
                               .block = {given->blockDimX, given->blockDimY, given->blockDimZ},
                               .shared_bytes = given->sharedMemBytes};
    if (!launch_made(&(*node)->kernel, function, is_kernel, given->kernelParams)) return taken_back(*node, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

static CUresult node_of(Node **node, CUgraphNode handle, CUgraphNodeType type, const char *this_call) {
    TAKE(Node, found, handle, NODE, CUDA_ERROR_INVALID_VALUE);
    *node = found;
    return found->type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult kernel_node_get_params(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *params) {
    ENTER("cuGraphKernelNodeGetParams");
    Node *node;
    CUresult error = node_of(&node, handle, CU_GRAPH_NODE_TYPE_KERNEL, this_call);
    if (error != CUDA_SUCCESS) return error;
    const Launch *kernel = &node->kernel;
    memset(params, 0, sizeof *params);
    if (kernel->is_kernel)
        params->kern = (CUkernel)kernel->function;
    else
        params->func = (CUfunction)kernel->function;
    params->gridDimX = kernel->grid[0], params->gridDimY = kernel->grid[1], params->gridDimZ = kernel->grid[2];
    params->blockDimX = kernel->block[0], params->blockDimY = kernel->block[1], params->blockDimZ = kernel->block[2];
    params->sharedMemBytes = kernel->shared_bytes;
    params->kernelParams = kernel->function->num_parameters > 0 ? kernel->values : NULL;
    return CUDA_SUCCESS;
}

/* A copy is of memory that the driver knows, each side of the kind that it is said to be. */
CUresult copy_checked(const CUDA_MEMCPY3D *copy) {
    if (copy->WidthInBytes == 0 || copy->Height == 0 || copy->Depth == 0) return CUDA_ERROR_INVALID_VALUE;
    const struct {
        CUmemorytype type;
        uint64_t device;
        const void *host;
    } sides[2] = {{copy->srcMemoryType, copy->srcDevice, copy->srcHost}, {copy->dstMemoryType, copy->dstDevice, copy->dstHost}};
    for (int i = 0; i < 2; i++) {
        if (sides[i].type == CU_MEMORYTYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
        if (sides[i].type == CU_MEMORYTYPE_HOST && sides[i].host == NULL) return CUDA_ERROR_INVALID_VALUE;
        if (sides[i].type != CU_MEMORYTYPE_HOST && memory_at(sides[i].device) == NULL) return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult add_memcpy_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const CUDA_MEMCPY3D *copy, CUcontext context) {
    ENTER("cuGraphAddMemcpyNode");
    TAKE(Context, where, context, CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
    (void)where;
    CUresult error = copy_checked(copy);
    if (error == CUDA_SUCCESS) error = added(node, graph, CU_GRAPH_NODE_TYPE_MEMCPY, after, count, this_call);
    if (error == CUDA_SUCCESS) (*node)->copy = *copy;
    return error;
}

CUresult memcpy_node_get_params(CUgraphNode handle, CUDA_MEMCPY3D *copy) {
    ENTER("cuGraphMemcpyNodeGetParams");
    Node *node;
    CUresult error = node_of(&node, handle, CU_GRAPH_NODE_TYPE_MEMCPY, this_call);
    if (error == CUDA_SUCCESS) *copy = node->copy;
    return error;
}

CUresult add_memset_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext context) {
    ENTER("cuGraphAddMemsetNode");
    TAKE(Context, where, context, CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
    (void)where;
    bool is_sized = fill->elementSize == 1 || fill->elementSize == 2 || fill->elementSize == 4;
    if (!is_sized || fill->width == 0 || fill->height == 0) return CUDA_ERROR_INVALID_VALUE;
    Memory *memory = memory_at(fill->dst);
    if (memory == NULL || !memory->object.is_alive) return CUDA_ERROR_INVALID_VALUE;
    CUresult error = added(node, graph, CU_GRAPH_NODE_TYPE_MEMSET, after, count, this_call);
    if (error == CUDA_SUCCESS) (*node)->fill = *fill;
    return error;
}

CUresult memset_node_get_params(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS *fill) {
    ENTER("cuGraphMemsetNodeGetParams");
    Node *node;
    CUresult error = node_of(&node, handle, CU_GRAPH_NODE_TYPE_MEMSET, this_call);
    if (error == CUDA_SUCCESS) *fill = node->fill;
    return error;
}

CUresult add_host_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const CUDA_HOST_NODE_PARAMS *host) {
    ENTER("cuGraphAddHostNode");
    if (host->fn == NULL) return CUDA_ERROR_INVALID_VALUE;
    CUresult error = added(node, graph, CU_GRAPH_NODE_TYPE_HOST, after, count, this_call);
    if (error == CUDA_SUCCESS) (*node)->host = *host;
    return error;
}

CUresult add_empty_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count) {
    ENTER("cuGraphAddEmptyNode");
    return added(node, graph, CU_GRAPH_NODE_TYPE_EMPTY, after, count, this_call);
}

static CUresult add_event_node(CUgraphNodeType type, CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, CUevent handle, const char *this_call) {
    TAKE(Event, event, handle, EVENT, CUDA_ERROR_INVALID_HANDLE);
    CUresult error = added(node, graph, type, after, count, this_call);
    if (error == CUDA_SUCCESS) (*node)->event = event;
    return error;
}

CUresult add_event_record_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, CUevent event) {
    ENTER("cuGraphAddEventRecordNode");
    return add_event_node(CU_GRAPH_NODE_TYPE_EVENT_RECORD, node, graph, after, count, event, this_call);
}

CUresult add_event_wait_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, CUevent event) {
    ENTER("cuGraphAddEventWaitNode");
    return add_event_node(CU_GRAPH_NODE_TYPE_WAIT_EVENT, node, graph, after, count, event, this_call);
}

static void node_copied(Node *to, const Node *from) {
    to->copy = from->copy, to->fill = from->fill, to->host = from->host, to->event = from->event;
    to->condition = from->condition, to->condition_type = from->condition_type, to->num_bodies = from->num_bodies;
    if (from->type == CU_GRAPH_NODE_TYPE_KERNEL) launch_copied(&to->kernel, &from->kernel);
    if (from->child != NULL) to->child = graph_copied(from->child, to);
    to->bodies = calloc(from->num_bodies + 1, sizeof *to->bodies);
    for (unsigned body = 0; body < from->num_bodies; body++) to->bodies[body] = graph_copied(from->bodies[body], to);
}

Graph *graph_copied(const Graph *from, Node *parent) {
    Graph *to = graph_made(parent);
    to->object.is_owned = true;
    for (size_t i = 0; i < from->num_nodes; i++) {
        const Node *node = from->nodes[i];
        Node **after = calloc(node->num_after + 1, sizeof *after);
        for (size_t j = 0; j < node->num_after; j++)
            for (size_t k = 0; k < i; k++)
                if (from->nodes[k] == node->after[j]) after[j] = to->nodes[k];
        node_copied(node_made(to, node->type, after, node->num_after), node);
        free(after);
    }
    return to;
}

static bool has_conditions(const Graph *graph) {
    for (size_t i = 0; i < graph->num_nodes; i++) {
        const Node *node = graph->nodes[i];
        if (node->type == CU_GRAPH_NODE_TYPE_CONDITIONAL || (node->child != NULL && has_conditions(node->child))) return true;
    }
    return false;
}

CUresult add_child_graph_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph handle) {
    ENTER("cuGraphAddChildGraphNode");
    TAKE(Graph, child, handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    if (has_conditions(child)) return CUDA_ERROR_NOT_SUPPORTED; /* no child graph may hold any */
    CUresult error = added(node, graph, CU_GRAPH_NODE_TYPE_GRAPH, after, count, this_call);
    if (error == CUDA_SUCCESS) (*node)->child = graph_copied(child, *node);
    return error;
}

CUresult child_graph_node_get_graph(CUgraphNode handle, CUgraph *graph) {
    ENTER("cuGraphChildGraphNodeGetGraph");
    Node *node;
    CUresult error = node_of(&node, handle, CU_GRAPH_NODE_TYPE_GRAPH, this_call);
    if (error == CUDA_SUCCESS) *graph = node->child;
    return error;
}

CUresult conditional_handle_create(CUgraphConditionalHandle *handle, CUgraph graph_handle, CUcontext context, unsigned initial, unsigned flags) {
    ENTER("cuGraphConditionalHandleCreate");
    TAKE(Graph, graph, graph_handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    TAKE(Context, where, context, CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
    if (flags > CU_GRAPH_COND_ASSIGN_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
    Condition *condition = made(CONDITION, sizeof(Condition));
    condition->object.is_owned = true; /* by its graph */
    condition->handle = *handle = 0x100000000ull + condition->object.number;
    condition->graph = graph, condition->context = where, condition->initial = initial, condition->flags = flags;
    return CUDA_SUCCESS;
}

static CUresult add_conditional(CUgraphNode *node, CUgraph handle, const CUgraphNode *after, size_t count, CUgraphNodeParams *given, const char *this_call) {
    TAKE(Graph, graph, handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    Condition *condition = condition_of(given->conditional.handle);
    unsigned size = given->conditional.size;
    CUgraphConditionalNodeType type = given->conditional.type;
    bool is_sized = type == CU_GRAPH_COND_TYPE_WHILE ? size == 1 : type == CU_GRAPH_COND_TYPE_IF ? size == 1 || size == 2 : size >= 1;
    if (condition == NULL || !condition->object.is_alive || condition->node != NULL || root_of(condition->graph) != root_of(graph)) return CUDA_ERROR_INVALID_VALUE;
    if (!is_sized || given->conditional.ctx != (CUcontext)condition->context) return CUDA_ERROR_INVALID_VALUE;
    CUresult error = added(node, handle, CU_GRAPH_NODE_TYPE_CONDITIONAL, after, count, this_call);
    if (error != CUDA_SUCCESS) return error;
    condition->node = *node;
    (*node)->condition = condition, (*node)->condition_type = type, (*node)->num_bodies = size;
    (*node)->bodies = calloc(size, sizeof *(*node)->bodies);
    for (unsigned body = 0; body < size; body++) (*node)->bodies[body] = graph_made(*node);
    given->conditional.phGraph_out = (*node)->bodies;
    return CUDA_SUCCESS;
}

CUresult add_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *given) {
    ENTER("cuGraphAddNode");
    (void)edges;
    if (given->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return add_conditional(node, graph, after, count, given, this_call);
    if (given->type == CU_GRAPH_NODE_TYPE_EMPTY) return added(node, graph, given->type, after, count, this_call);
    return CUDA_ERROR_NOT_SUPPORTED; /* the others have calls of their own */
}

CUresult graph_get_nodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    ENTER("cuGraphGetNodes");
    TAKE(Graph, graph, handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; nodes != NULL && i < *count; i++) nodes[i] = i < graph->num_nodes ? graph->nodes[i] : NULL;
    if (nodes == NULL || *count > graph->num_nodes) *count = graph->num_nodes;
    return CUDA_SUCCESS;
}

CUresult node_get_type(CUgraphNode handle, CUgraphNodeType *type) {
    ENTER("cuGraphNodeGetType");
    TAKE(Node, node, handle, NODE, CUDA_ERROR_INVALID_VALUE);
    *type = node->type;
    return CUDA_SUCCESS;
}

CUresult graph_get_edges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edges, size_t *count) {
    ENTER("cuGraphGetEdges");
    TAKE(Graph, graph, handle, GRAPH, CUDA_ERROR_INVALID_VALUE);
    size_t found = 0, room = from == NULL ? 0 : *count;
    for (size_t i = 0; i < graph->num_nodes; i++)
        for (size_t j = 0; j < graph->nodes[i]->num_after; j++, found++) {
            if (found >= room) continue;
            from[found] = graph->nodes[i]->after[j], to[found] = graph->nodes[i];
            if (edges == NULL) continue;
            memset(&edges[found], 0, sizeof *edges);
            if (to[found]->kernel.starts_early && from[found]->type == CU_GRAPH_NODE_TYPE_KERNEL)
                edges[found].type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, edges[found].from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
        }
    *count = found;
    return CUDA_SUCCESS;
}
