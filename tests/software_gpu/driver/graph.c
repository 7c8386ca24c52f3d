/* Stream capture and graphs. A graph is the list of work in the order it was captured, and runs in that order: a total order
 * honours every dependency, so edges need no record. Memory allocation inside a graph is refused.
 */
#include "driver.h"

#define GRAPH_MAGIC 0x6870617247575355ull
#define EXEC_MAGIC 0x6365784557535356ull

struct CUgraphNode_st { struct op op; struct CUgraphNode_st *next; };
struct CUgraph_st { uint64_t magic; struct CUgraphNode_st *first, **end; size_t count; };
struct CUgraphExec_st { uint64_t magic; int references; size_t count; struct op ops[]; };
struct capture { CUgraph graph; CUstream origin; uint64_t id; bool is_invalid; };

static uint64_t next_capture_id = 1;

static void graph_free(CUgraph graph)
{
    for (CUgraphNode node = graph->first, next; node; node = next) {
        next = node->next;
        free(node);
    }
    graph->magic = 0;
    free(graph);
}

static CUgraph graph_new(void)
{
    CUgraph graph = calloc(1, sizeof *graph);
    if (graph) {
        graph->magic = GRAPH_MAGIC;
        graph->end = &graph->first;
    }
    return graph;
}

void capture_invalidate(struct capture *capture) { capture->is_invalid = true; }

/* With work_lock held. */
CUresult graph_record(struct capture *capture, struct op op)
{
    NEED(!capture->is_invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CUgraphNode node = calloc(1, sizeof *node);
    NEED(node, CUDA_ERROR_OUT_OF_MEMORY);
    if (op.exec) __atomic_fetch_add(&op.exec->references, 1, __ATOMIC_RELAXED);
    node->op = op;
    *capture->graph->end = node;
    capture->graph->end = &node->next;
    capture->graph->count++;
    return CUDA_SUCCESS;
}

static CUresult begin(CUstream stream)
{
    NEED(!stream->capture, CUDA_ERROR_ILLEGAL_STATE);
    struct capture *capture = calloc(1, sizeof *capture);
    if (!capture || !(capture->graph = graph_new())) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    capture->origin = stream;
    capture->id = next_capture_id++;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

API(cuStreamBeginCapture_v2, (CUstream handle, int mode), (handle, mode))
{
    CUstream stream;
    NEED(mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    NEED(!stream->is_default, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    pthread_mutex_lock(&work_lock);
    CUresult rc = begin(stream);
    pthread_mutex_unlock(&work_lock);
    return rc;
}

static CUresult end(CUstream stream, CUgraph *out)
{
    struct capture *capture = stream->capture;
    *out = NULL;
    NEED(capture, CUDA_ERROR_ILLEGAL_STATE);
    NEED(capture->origin == stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    stream_leave_capture(capture);
    CUresult rc = capture->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    if (rc == CUDA_SUCCESS) *out = capture->graph;
    else graph_free(capture->graph);
    free(capture);
    return rc;
}

API(cuStreamEndCapture, (CUstream handle, CUgraph *out), (handle, out))
{
    CUstream stream;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    pthread_mutex_lock(&work_lock);
    CUresult rc = end(stream, out);
    pthread_mutex_unlock(&work_lock);
    return rc;
}

static CUresult capture_info(CUstream handle, int *status, uint64_t *id, CUgraph *graph)
{
    CUstream stream;
    NEED(status, CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    pthread_mutex_lock(&work_lock);
    struct capture *capture = stream->capture;
    *status = !capture ? CU_STREAM_CAPTURE_STATUS_NONE : capture->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? capture->graph : NULL;
    pthread_mutex_unlock(&work_lock);
    return CUDA_SUCCESS;
}

API(cuStreamIsCapturing, (CUstream stream, int *status), (stream, status)) { return capture_info(stream, status, NULL, NULL); }

API(cuStreamGetCaptureInfo_v2, (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **nodes, size_t *count), (stream, status, id, graph, nodes, count))
{
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    return capture_info(stream, status, id, graph);
}

API(cuStreamGetCaptureInfo_v3, (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **nodes, const void **edges, size_t *count),
    (stream, status, id, graph, nodes, edges, count))
{
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return capture_info(stream, status, id, graph);
}

API(cuThreadExchangeStreamCaptureMode, (int *mode), (mode))
{
    static _Thread_local int current = CU_STREAM_CAPTURE_MODE_GLOBAL;
    NEED(mode && *mode >= 0 && *mode <= 2, CUDA_ERROR_INVALID_VALUE);
    int before = current;
    current = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static bool is_graph(CUgraph graph) { return graph && graph->magic == GRAPH_MAGIC; }
static bool is_exec(CUgraphExec exec) { return exec && exec->magic == EXEC_MAGIC; }

API(cuGraphCreate, (CUgraph *out, unsigned flags), (out, flags))
{
    NEED(out && flags == 0, CUDA_ERROR_INVALID_VALUE);
    *out = graph_new();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API(cuGraphDestroy, (CUgraph graph), (graph))
{
    NEED(is_graph(graph), CUDA_ERROR_INVALID_VALUE);
    graph_free(graph);
    return CUDA_SUCCESS;
}

API(cuGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *count), (graph, nodes, count))
{
    NEED(is_graph(graph) && count, CUDA_ERROR_INVALID_VALUE);
    size_t n = 0;
    for (CUgraphNode node = graph->first; nodes && node && n < *count; node = node->next) nodes[n++] = node;
    *count = nodes ? n : graph->count;
    return CUDA_SUCCESS;
}

API(cuGraphNodeGetType, (CUgraphNode node, int *type), (node, type))
{
    static const int types[] = {[OP_COPY] = CU_GRAPH_NODE_TYPE_MEMCPY, [OP_SET] = CU_GRAPH_NODE_TYPE_MEMSET, [OP_KERNEL] = CU_GRAPH_NODE_TYPE_KERNEL,
                                [OP_HOST] = CU_GRAPH_NODE_TYPE_HOST, [OP_CALLBACK] = CU_GRAPH_NODE_TYPE_HOST, [OP_EVENT] = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                                [OP_WAIT] = CU_GRAPH_NODE_TYPE_EMPTY, [OP_GRAPH] = CU_GRAPH_NODE_TYPE_GRAPH, [OP_FREE] = CU_GRAPH_NODE_TYPE_MEM_FREE};
    NEED(node && type, CUDA_ERROR_INVALID_VALUE);
    *type = types[node->op.kind];
    return CUDA_SUCCESS;
}

static void exec_drop(CUgraphExec exec)
{
    if (__atomic_sub_fetch(&exec->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    for (size_t n = 0; n < exec->count; n++)
        if (exec->ops[n].exec) exec_drop(exec->ops[n].exec);
    free(exec);
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph)
{
    NEED(out && is_graph(graph), CUDA_ERROR_INVALID_VALUE);
    CUgraphExec exec = calloc(1, sizeof *exec + graph->count * sizeof exec->ops[0]);
    NEED(exec, CUDA_ERROR_OUT_OF_MEMORY);
    exec->magic = EXEC_MAGIC;
    exec->references = 1;
    for (CUgraphNode node = graph->first; node; node = node->next) {
        if (node->op.exec) __atomic_fetch_add(&node->op.exec->references, 1, __ATOMIC_RELAXED);
        exec->ops[exec->count++] = node->op;
    }
    *out = exec;
    return CUDA_SUCCESS;
}

API(cuGraphInstantiateWithFlags, (CUgraphExec *out, CUgraph graph, unsigned long long flags), (out, graph, flags))
{
    (void)flags; /* upload, automatic free on launch: nothing to do for this driver */
    return instantiate(out, graph);
}

API(cuGraphInstantiateWithParams, (CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), (out, graph, parameters))
{
    NEED(parameters, CUDA_ERROR_INVALID_VALUE);
    parameters->hErrNode_out = NULL;
    parameters->result_out = 0;
    return instantiate(out, graph);
}

API(cuGraphExecDestroy, (CUgraphExec exec), (exec))
{
    NEED(is_exec(exec), CUDA_ERROR_INVALID_VALUE);
    exec->magic = 0;
    exec_drop(exec);
    return CUDA_SUCCESS;
}

API(cuGraphUpload, (CUgraphExec exec, CUstream handle), (exec, handle))
{
    CUstream stream;
    NEED(is_exec(exec), CUDA_ERROR_INVALID_VALUE);
    return stream_resolve(handle, &stream);
}

API(cuGraphLaunch, (CUgraphExec exec, CUstream handle), (exec, handle))
{
    CUstream stream;
    NEED(is_exec(exec), CUDA_ERROR_INVALID_VALUE);
    TRY(stream_resolve(handle, &stream));
    __atomic_fetch_add(&exec->references, 1, __ATOMIC_RELAXED);
    CUresult rc = stream_submit(stream, (struct op){.kind = OP_GRAPH, .exec = exec}, false);
    if (rc != CUDA_SUCCESS || stream->capture) exec_drop(exec); /* a capture took its own reference */
    return rc;
}

/* On the worker; the launch's reference keeps the graph until it has run. */
void graph_run(CUstream stream, CUgraphExec exec)
{
    for (size_t n = 0; n < exec->count; n++) {
        struct op op = exec->ops[n];
        if (op.exec) __atomic_fetch_add(&op.exec->references, 1, __ATOMIC_RELAXED);
        op_execute(stream, &op);
    }
    exec_drop(exec);
}
