/* A stand-in for NVIDIA's driver: the calls that graphs are captured, built, launched and looked at with, on a machine
 * that has no GPU. It is compiled as libcuda.so.1 and loaded by the real bindings, which ask it for their functions.
 *
 * Memory of its devices is memory of the host, a kernel is a function of the host's, a module an ELF of the host's.
 * What the driver refuses, this refuses with the same code; what the driver leaves undefined (a handle that was
 * destroyed, memory that was freed), this does not do, but complains of. One lock is held in every call.
 */
#pragma once
#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DEVICES 2
#define MOST_PARAMETERS 64
#define MOST_DEPENDENCIES 256

typedef enum {
    CONTEXT, MEMORY, STREAM, EVENT, MODULE, FUNCTION, GRAPH, NODE, EXEC, CONDITION, RESERVATION, PHYSICAL, MAPPING, KINDS
} Kind;

/* What a handle points at. Nothing is given back before a reset, so that a handle is known when it comes again. */
typedef struct Object {
    Kind kind;
    bool is_alive;
    bool is_owned; /* by another object: a child graph, a body, a node */
    unsigned number;
    struct Object *next;   /* in its bucket of the table */
    struct Object *before; /* of its kind, made before this one */
} Object;

typedef struct CUctx_st {
    Object object;
    int device;
    struct CUstream_st *default_stream;
} Context;

typedef struct {
    Object object;
    Context *context; /* NULL for pinned memory of the host */
    char *base;
    size_t size;
} Memory;

/* Memory without an address; it is there as long as a handle or a mapping. */
typedef struct {
    Object object;
    size_t size;
    unsigned references;
} Physical;

/* Addresses that are reserved, or memory that is mapped there. */
typedef struct {
    Object object;
    uint64_t base;
    size_t size;
    Physical *memory;
    bool has_access;
} Span;

typedef struct {
    Object object;
    Context *context;
    void *library;
    int file;
} Module;

typedef struct {
    Object object;
    Context *context;
    Module *module; /* NULL: a callback of the host's */
    char name[256];
    void *body;
    void (*callback)(void **parameters);
    unsigned sizes[MOST_PARAMETERS];
    unsigned num_parameters;
    unsigned shared_bytes; /* dynamic ones that a block may have, more than 48 KB only if asked for */
} Function;

typedef struct CUgraphNode_st Node;
typedef struct CUgraph_st Graph;

typedef struct {
    Object object;
    uint64_t handle;
    Graph *graph;
    Context *context;
    Node *node;
    unsigned value, initial, flags;
} Condition;

typedef struct {
    Function *function;
    bool is_kernel; /* a CUkernel, not a CUfunction */
    unsigned grid[3], block[3], shared_bytes;
    unsigned cluster; /* blocks of a cluster; 0: none */
    bool starts_early; /* it may run beside the kernel before it */
    uint64_t *words; /* the parameters' values, each in as many words as it takes */
    void **values;   /* where in the words each parameter begins */
} Launch;

struct CUgraphNode_st {
    Object object;
    Graph *graph;
    CUgraphNodeType type;
    Node **after;
    size_t num_after;
    Launch kernel;
    CUDA_MEMCPY3D copy;
    CUDA_MEMSET_NODE_PARAMS fill;
    CUDA_HOST_NODE_PARAMS host;
    struct CUevent_st *event;
    Graph *child;
    Condition *condition;
    CUgraphConditionalNodeType condition_type;
    unsigned num_bodies;
    CUgraph *bodies;
};

struct CUgraph_st {
    Object object;
    Node *parent; /* whose child or body it is */
    Node **nodes; /* each behind all those that it waits for */
    size_t num_nodes, room;
};

typedef struct CUgraphExec_st {
    Object object;
    Graph *graph; /* a copy, as it was when it was instantiated */
    unsigned under_way;
} Exec;

/* A place in a stream, for an event and those who wait for it. */
typedef struct {
    bool is_reached;
} Mark;

typedef struct CUevent_st {
    Object object;
    Context *context;
    Mark *mark;
    struct Capture *capture; /* recorded in a capture that goes on */
    Node *tails[MOST_DEPENDENCIES];
    size_t num_tails;
} Event;

typedef struct Work {
    enum { RUN_NODE, RUN_EXEC, REACH, WAIT } type;
    Node *node;
    Exec *exec;
    Mark *mark;
    struct Work *next;
} Work;

typedef struct Capture {
    Graph *graph;
    struct CUstream_st *origin;
    CUstreamCaptureMode mode;
    uint64_t thread;
    bool is_invalid;
} Capture;

typedef struct CUstream_st {
    Object object;
    Context *context;
    Work *first, *last;
    Capture *capture;
    Node *tails[MOST_DEPENDENCIES]; /* what the next node of the capture comes behind */
    size_t num_tails;
} Stream;

/* objects.c */
void lock(void);
void unlock(int *locked);
CUresult entered(const char *call);
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *made(Kind kind, size_t size);
void *known(const void *handle, Kind kind);
void *living(const void *handle, Kind kind, const char *call);
Object *newest(Kind kind);
double chance(void);
bool is_lazy(void);
bool goes_on(void);

#define ENTER(call)                                                   \
    lock();                                                           \
    int locked __attribute__((cleanup(unlock), unused)) = 1;          \
    static const char *const this_call __attribute__((unused)) = call; \
    do {                                                              \
        CUresult refused = entered(call);                             \
        if (refused != CUDA_SUCCESS) return refused;                  \
    } while (0)

/* A handle that is not known is an invalid one; one that was destroyed is complained of as well. */
#define TAKE(type, name, handle, kind, error)          \
    type *name = living((handle), (kind), this_call); \
    if (name == NULL) return (error)

/* memory.c */
Context *current_context(void);
size_t free_bytes(const Context *context);
Memory *memory_at(uint64_t address);
void check_memory(uint64_t address, const char *who);

/* modules.c */
bool launch_made(Launch *launch, Function *function, bool is_kernel, void **values);
void launch_copied(Launch *to, const Launch *from);
void launch_run(const Launch *launch);

/* graphs.c */
Graph *graph_made(Node *parent);
Node *node_made(Graph *graph, CUgraphNodeType type, Node *const *after, size_t num_after);
Graph *graph_copied(const Graph *from, Node *parent);
void graph_dies(Graph *graph);
CUresult copy_checked(const CUDA_MEMCPY3D *copy);

/* execs.c */
void node_run(Node *node);
void exec_run(Exec *exec);
Condition *condition_of(uint64_t handle);

/* streams.c */
Stream *stream_of(CUstream handle, const char *call);
Capture *forbids(void);
CUresult enqueued_node(Stream *stream, Node *node);
void enqueued_exec(Stream *stream, Exec *exec);
void run_all(void);
bool is_under_way(const Module *module);
