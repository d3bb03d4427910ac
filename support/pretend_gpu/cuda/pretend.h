// SPDX-License-Identifier: Apache-2.0
// What the parts of the pretend GPU share. A function named pretend_<name> is what the library that the program loads
// exports as <name> (build.py); a name without such a function returns 0.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
typedef std::lock_guard<std::recursive_mutex> Lock;

// Settings are environment variables (README.md).
int setting(const char* name, int otherwise);
int machine_device_count();
int device_count();
size_t memory_limit();  // bytes of one device, for this process
int compute_capability_major();
const char* device_name();
int compute_capability_minor();

// Lines on stderr, and CUDA's last error of this thread.
void report(const char* format, ...);
bool reports_errors();
cudaError_t fail(cudaError_t error, const char* function);
#define FAIL(error) return fail(error, __func__)
const char* error_name(int error);
double now();
std::recursive_mutex& mutex();  // one for all state

// Memory: host memory that is registered with a device.
enum { HOST_ALLOCATED = -2, HOST_REGISTERED = -3 };
struct Block {
  size_t size;
  int kind;  // cudaMemoryType
  int dev;
  int fd;  // a memfd, -1 for a mapping of the driver's, or one of the above
  void* base;
};
extern thread_local int current_device;
extern size_t used[64];  // bytes by device
std::map<uintptr_t, Block>& blocks();
Block* find(const void* address, uintptr_t* start = 0);
cudaError_t allocate(void** address, size_t bytes);
cudaError_t free_any(void* address);
void copy_bytes(void* to, const void* from, size_t bytes);
long attribute(int attribute);

// Streams, and graphs: what is put onto a capturing stream becomes a node, and runs when the graph is launched.
struct Node {
  std::vector<Node*> up;
  int type;  // cudaGraphNodeType
  std::vector<std::function<void()>> replay;
};
struct Graph {
  std::vector<Node*> nodes;
};
struct Stream;
struct Capture {
  uint64_t id;
  int mode;
  int status = cudaStreamCaptureStatusActive;
  Stream* origin;
  Graph* g;
  pthread_t thread;
  std::set<Stream*> members;
};
struct Stream {
  int dev = 0, prio = 0;
  unsigned flags = 0;
  Capture* cap = 0;
  std::set<Node*> tips;
  std::vector<cudaGraphNode_t> deps;
  uint64_t id = 0;
};
struct Event {
  unsigned flags = 0;
  bool rec = false;
  double t = 0;
  Capture* cap = 0;
  uint64_t capid = 0;
  std::set<Node*> tips;
  int dev = 0;
};
extern thread_local Node* captured_node;  // of this thread's last asynchronous operation, if it was captured
extern thread_local bool replaying;
Stream* stream_of(cudaStream_t stream);
Event* event_of(cudaEvent_t event);
cudaError_t invalidate(Capture* capture, cudaError_t error, const char* function);
cudaError_t capture_unsafe(const char* function);  // an error if a capture forbids this call
cudaError_t stream_op(cudaStream_t stream, int type, const char* function, Node** node = 0);
template <class F>
void on_replay(F function) {
  if (captured_node) captured_node->replay.push_back(function);
}

// Kernels have no effect; their launches are checked and counted.
struct Function {
  std::string name;
  int dyn = 48 << 10;
  long n = 0;
};
std::unordered_map<const void*, Function>& functions();
extern std::atomic<long> launches, graph_launches;
cudaError_t launch(const void* function, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream);
cudaError_t occupancy(int* blocks, int threads);
void* entry_point(const char* name);

// Functions of the runtime that other parts call.
#define DECLARE(name) EXPORT decltype(name) pretend_##name
DECLARE(cudaDriverGetVersion);
DECLARE(cudaDeviceGetPCIBusId);
DECLARE(cudaDeviceGetByPCIBusId);
DECLARE(cudaDeviceGetStreamPriorityRange);
DECLARE(cudaMalloc);
DECLARE(cudaFree);
DECLARE(cudaMemGetInfo);
DECLARE(cudaFuncSetAttribute);
DECLARE(cudaStreamSynchronize);
DECLARE(cudaStreamIsCapturing);
DECLARE(cudaEventCreateWithFlags);
extern char contexts[64];  // the address of a device's byte stands for its context

// Number formats, which NCCL's sums and cuBLASLt's products need.
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);
float bfloat16_to_float(uint16_t bits);
uint16_t float_to_bfloat16(float value);
float e4m3_to_float(uint8_t bits);
float e5m2_to_float(uint8_t bits);

// cuBLASLt's objects.
struct MatrixLayout {
  int type;
  uint32_t order;
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch;
  int32_t pad;
  int64_t stride;
};
struct MatmulDescription {
  int transposes_a, transposes_b;
};
