/* CUDA's runtime for a device that is described, and not there.

   MEMGRAPH_DESCRIBED="141000000000 9 0 132 name"      memory, compute capability, multiprocessors, name

   Preloaded before libcudart, it lets torch's CUDA build see one device of these properties, so that torch itself
   chooses the ops that it would dispatch on it.  Memory is address space of the host, which takes no pages until it is
   written.  Streams and events are numbers, and all copies have ended when they return; the time of an event is that of
   the host.  A kernel can't be launched: that is an error, so nothing is computed wrongly in silence.  What runs ops on
   the host instead (host_kernels.py) sets `described_graph`, which is called when a graph is captured or launched.

   The library is named libcuda.so.1, because torch looks for one name of the driver as well.  */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <cuda_runtime_api.h>

#define HEADER (2ul << 20) /* before each block; a block begins at a multiple of it, as on a device */
#define HANDLES (1ul << 20) /* streams and events about which something is kept */
#define AT(handle) ((size_t)(handle) / 16 % HANDLES)
#define PINNED 4096 /* blocks of the host at once */

static size_t used;
static double recorded_ms[HANDLES];
static unsigned long captured;   /* the graph of the capture that runs, or 0 */
static char in_capture[HANDLES]; /* streams and events that belong to it */
static int is_spoiled;           /* a call that no capture allows has ended it */
void (*described_graph)(unsigned long graph, char how); /* 'c'aptured, 'l'aunched, 'd'estroyed */
static struct { char *begin; size_t nbytes; } pinned[PINNED];
static unsigned long last = 1; /* stream or event */
static _Thread_local cudaError_t failure; /* of a launch, which torch asks for afterwards */

static cudaError_t described(size_t *memory, int *major, int *minor, int *multiprocessors, char *name) {
  const char *text = getenv("MEMGRAPH_DESCRIBED");
  int found = text ? sscanf(text, "%zu %d %d %d %200[^\n]", memory, major, minor, multiprocessors, name) : 0;
  return found == 5 ? cudaSuccess : cudaErrorNoDevice;
}

static size_t memory_nbytes(void) {
  size_t memory = 0;
  int number;
  char name[201];
  described(&memory, &number, &number, &number, name);
  return memory;
}

/* The device */

cudaError_t cudaGetDeviceCount(int *count) { *count = memory_nbytes() > 0; return *count ? cudaSuccess : cudaErrorNoDevice; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return failure; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) { *value = 0; return cudaSuccess; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

cudaError_t cudaGetLastError(void) {
  cudaError_t found = failure;
  failure = cudaSuccess;
  return found;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *facts, int device) {
  int major, minor, multiprocessors;
  size_t memory;
  char name[201] = "";
  if (device || described(&memory, &major, &minor, &multiprocessors, name) != cudaSuccess) return cudaErrorInvalidDevice;
  memset(facts, 0, sizeof *facts);
  strcpy(facts->name, name);
  facts->totalGlobalMem = memory;
  facts->major = major;
  facts->minor = minor;
  facts->multiProcessorCount = multiprocessors;
  facts->warpSize = 32; /* from here on as on every device of capability 7.0 or more */
  facts->maxThreadsPerBlock = 1024;
  facts->maxThreadsPerMultiProcessor = 1024;
  facts->regsPerBlock = facts->regsPerMultiprocessor = 65536;
  facts->sharedMemPerBlock = facts->sharedMemPerBlockOptin = 49152;
  facts->sharedMemPerMultiprocessor = 65536;
  facts->maxThreadsDim[0] = facts->maxThreadsDim[1] = 1024;
  facts->maxThreadsDim[2] = 64;
  facts->maxGridSize[0] = 2147483647;
  facts->maxGridSize[1] = facts->maxGridSize[2] = 65535;
  return cudaSuccess;
}

/* Memory */

cudaError_t cudaMalloc(void **block, size_t nbytes) {
  if (__atomic_add_fetch(&used, nbytes, __ATOMIC_RELAXED) > memory_nbytes()) {
    __atomic_sub_fetch(&used, nbytes, __ATOMIC_RELAXED);
    return cudaErrorMemoryAllocation;
  }
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *base = mmap(NULL, nbytes + 2 * HEADER, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  char *start = (char *)(((size_t)base + 2 * HEADER - 1) / HEADER * HEADER);
  void **header = (void **)(start - 16); /* in a page of its own */
  header[0] = base;
  header[1] = (void *)nbytes;
  *block = start;
  return cudaSuccess;
}

cudaError_t cudaFree(void *block) {
  if (!block) return cudaSuccess;
  void **header = (void **)((char *)block - 16);
  size_t nbytes = (size_t)header[1];
  munmap(header[0], nbytes + 2 * HEADER);
  __atomic_sub_fetch(&used, nbytes, __ATOMIC_RELAXED);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  *total = memory_nbytes();
  *unused = *total - __atomic_load_n(&used, __ATOMIC_RELAXED);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *into, const void *of, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  memcpy(into, of, nbytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *into, const void *of, size_t nbytes, enum cudaMemcpyKind kind) {
  memcpy(into, of, nbytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *block, int value, size_t nbytes, cudaStream_t stream) {
  memset(block, value, nbytes);
  return cudaSuccess;
}

/* Memory of the host */

cudaError_t cudaHostRegister(void *block, size_t nbytes, unsigned flags) {
  for (int i = 0; i < PINNED; i++) {
    char *free = NULL;
    if (__atomic_compare_exchange_n(&pinned[i].begin, &free, (char *)block, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      pinned[i].nbytes = nbytes;
      return cudaSuccess;
    }
  }
  return cudaErrorMemoryAllocation;
}

cudaError_t cudaHostUnregister(void *block) {
  for (int i = 0; i < PINNED; i++)
    if (pinned[i].begin == block) {
      pinned[i].nbytes = 0;
      pinned[i].begin = NULL;
      return cudaSuccess;
    }
  return cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaHostAlloc(void **block, size_t nbytes, unsigned flags) {
  if (posix_memalign(block, 4096, nbytes)) return cudaErrorMemoryAllocation;
  return cudaHostRegister(*block, nbytes, flags);
}

cudaError_t cudaFreeHost(void *block) {
  cudaError_t found = cudaHostUnregister(block);
  if (found == cudaSuccess) free(block);
  return found;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *facts, const void *address) {
  memset(facts, 0, sizeof *facts);
  for (int i = 0; i < PINNED; i++) {
    char *begin = pinned[i].begin;
    if (begin && begin <= (char *)address && (char *)address < begin + pinned[i].nbytes) {
      facts->type = cudaMemoryTypeHost;
      facts->devicePointer = facts->hostPointer = (void *)address;
    }
  }
  return cudaSuccess;
}

/* Streams and events */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = (cudaStream_t)(16 * __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = (cudaEvent_t)(16 * __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  recorded_ms[AT(event)] = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
  in_capture[AT(event)] = in_capture[AT(stream)];
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = recorded_ms[AT(end)] - recorded_ms[AT(begin)];
  return cudaSuccess;
}

/* Captures: a stream belongs to one if it began there, or waits for an event of one that does */

static cudaError_t spoiled(cudaError_t why) {
  is_spoiled = 1;
  return why;
}

cudaError_t cudaDeviceSynchronize(void) { return captured ? spoiled(cudaErrorStreamCaptureUnsupported) : cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return captured && in_capture[AT(stream)] ? spoiled(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (!captured) return cudaSuccess;
  if (in_capture[AT(stream)] && !in_capture[AT(event)] && recorded_ms[AT(event)]) return spoiled(cudaErrorStreamCaptureIsolation);
  in_capture[AT(stream)] |= in_capture[AT(event)];
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if (captured) return cudaErrorIllegalState;
  memset(in_capture, 0, sizeof in_capture);
  is_spoiled = 0;
  in_capture[AT(stream)] = 1;
  captured = 16 * __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  *graph = is_spoiled ? NULL : (cudaGraph_t)captured;
  if (described_graph) described_graph(is_spoiled ? 0 : captured, 'c');
  captured = 0;
  memset(in_capture, 0, sizeof in_capture);
  return is_spoiled ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = captured && in_capture[AT(stream)] ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  if (id) *id = captured;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
  *ready = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (!described_graph) return cudaErrorNotSupported;
  described_graph((unsigned long)graph, 'l');
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  if (described_graph) described_graph((unsigned long)graph, 'd');
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* Kernels */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  return failure = cudaErrorNotSupported; /* begins a launch */
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  return failure = cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
  return failure = cudaErrorNotSupported;
}

/* cuDNN's recurrent nets: torch asks for the size of packed weights while it chooses an op.  Each fake tensor has a
   storage of its own, which is never as large; so no size is needed but one that no storage has.  */

int cudnnCreate(void **handle) { *handle = (void *)16; return 0; }
int cudnnDestroy(void *handle) { return 0; }
int cudnnSetStream(void *handle, cudaStream_t stream) { return 0; }
int cudnnSetDropoutDescriptor(void *of, void *handle, float p, void *states, size_t nbytes, unsigned long long seed) { return 0; }

int cudnnGetRNNWeightSpaceSize(void *handle, void *of, size_t *nbytes) {
  *nbytes = 1ul << 60;
  return 0;
}
