// SPDX-License-Identifier: Apache-2.0
// Kernels: registered, checked at launch, counted. Operators of torch (operators.py) are put onto streams here.
#include "pretend.h"

std::unordered_map<const void*, Function>& functions() {
  static auto* f = new std::unordered_map<const void*, Function>;
  return *f;
}
struct Variable {
  std::string name;
  size_t size;
  void* mem;
};
static std::unordered_map<const void*, Variable>& variables() {
  static auto* f = new std::unordered_map<const void*, Variable>;
  return *f;
}
static void dump() {
  const char* p = getenv("PRETEND_GPU_KERNELS");
  if (!p || !*p) return;
  Lock lock(mutex());
  std::string f = std::string(p) + "." + std::to_string(getpid());
  std::map<std::string, long> c;
  for (auto& k : functions())
    if (k.second.n) c[k.second.name] += k.second.n;
  if (c.empty()) return;
  FILE* o = fopen(f.c_str(), "w");
  if (!o) return;
  for (auto& k : c) fprintf(o, "%ld %s\n", k.second, k.first.c_str());
  fprintf(o, "%ld TOTAL kernel launches\n%ld TOTAL graph launches\n", launches.load(), graph_launches.load());
  fclose(o);
}
EXPORT void** pretend___cudaRegisterFatBinary(void*) {
  static bool once = (atexit(dump), true);
  (void)once;
  return (void**)calloc(1, 64);
}
EXPORT void pretend___cudaRegisterFatBinaryEnd(void**) {}
EXPORT void pretend___cudaUnregisterFatBinary(void**) {}
EXPORT char pretend___cudaInitModule(void**) { return 1; }
EXPORT void pretend___cudaRegisterFunction(void**, const char* h, char*, const char* name, int, void*, void*, void*,
                                           void*, int*) {
  Lock lock(mutex());
  functions()[h].name = name ? name : "?";
}
EXPORT void pretend___cudaRegisterVar(void**, char* h, char*, const char* name, int, size_t n, int, int) {
  Lock lock(mutex());
  variables()[h] = Variable{name, n, calloc(1, n + 16)};
}
EXPORT void pretend___cudaRegisterManagedVar(void**, void** h, char*, const char* name, int, size_t n, int, int) {
  Lock lock(mutex());
  *h = calloc(1, n + 16);
  variables()[h] = Variable{name, n, *h};
}
EXPORT cudaError_t pretend_cudaGetSymbolAddress(void** p, const void* s) {
  Lock lock(mutex());
  auto it = variables().find(s);
  if (it == variables().end()) FAIL(cudaErrorInvalidSymbol);
  *p = it->second.mem;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGetSymbolSize(size_t* p, const void* s) {
  Lock lock(mutex());
  auto it = variables().find(s);
  if (it == variables().end()) FAIL(cudaErrorInvalidSymbol);
  *p = it->second.size;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpyToSymbol(const void* s, const void* src, size_t n, size_t o, cudaMemcpyKind) {
  void* p;
  if (cudaError_t e = pretend_cudaGetSymbolAddress(&p, s)) return e;
  copy_bytes((char*)p + o, src, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpyToSymbolAsync(const void* s, const void* src, size_t n, size_t o, cudaMemcpyKind k,
                                                   cudaStream_t) {
  return pretend_cudaMemcpyToSymbol(s, src, n, o, k);
}
EXPORT cudaError_t pretend_cudaMemcpyFromSymbol(void* d, const void* s, size_t n, size_t o, cudaMemcpyKind) {
  void* p;
  if (cudaError_t e = pretend_cudaGetSymbolAddress(&p, s)) return e;
  copy_bytes(d, (char*)p + o, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpyFromSymbolAsync(void* d, const void* s, size_t n, size_t o, cudaMemcpyKind k,
                                                     cudaStream_t) {
  return pretend_cudaMemcpyFromSymbol(d, s, n, o, k);
}
struct CallConfiguration {
  dim3 g, b;
  size_t sm;
  void* st;
};
static thread_local std::vector<CallConfiguration>* call_configurations = 0;
EXPORT unsigned pretend___cudaPushCallConfiguration(dim3 g, dim3 b, size_t sm, void* st) {
  if (!call_configurations) call_configurations = new std::vector<CallConfiguration>;
  call_configurations->push_back(CallConfiguration{g, b, sm, st});
  return 0;
}
EXPORT cudaError_t pretend___cudaPopCallConfiguration(dim3* g, dim3* b, size_t* sm, void* st) {
  if (!call_configurations || call_configurations->empty()) FAIL(cudaErrorMissingConfiguration);
  CallConfiguration c = call_configurations->back();
  call_configurations->pop_back();
  *g = c.g;
  *b = c.b;
  *sm = c.sm;
  *(void**)st = c.st;
  return cudaSuccess;
}
cudaError_t launch(const void* f, dim3 g, dim3 b, size_t sm, cudaStream_t s) {
  launches++;
  {
    Lock lock(mutex());
    auto it = functions().find(f);
    const char* nm = it == functions().end() ? "?" : it->second.name.c_str();
    if (it != functions().end()) it->second.n++;
    int dyn = it == functions().end() ? 232448 : it->second.dyn;
    if (!g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535 || g.x > 2147483647u || !b.x || !b.y || !b.z || b.x > 1024 ||
        b.y > 1024 || b.z > 64 || (size_t)b.x * b.y * b.z > 1024) {
      report("bad launch grid (%u,%u,%u) block (%u,%u,%u) of %s", g.x, g.y, g.z, b.x, b.y, b.z, nm);
      FAIL(cudaErrorInvalidConfiguration);
    }
    if ((long)sm > dyn) {
      report("launch wants %zu bytes of shared memory, %d allowed: %s", sm, dyn, nm);
      FAIL(cudaErrorInvalidValue);
    }
    auto st = stream_of(s);
    if (st && st->dev != current_device && (uintptr_t)s > 2) {
      report("launch on a stream of device %d while device %d is current: %s", st->dev, current_device, nm);
      FAIL(cudaErrorInvalidResourceHandle);
    }
    static int tr = setting("PRETEND_GPU_TRACE", 0);
    if (tr > 1) report("launch %s", nm);
  }
  return stream_op(s, 0, "launch");
}
EXPORT cudaError_t pretend_cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t sm, cudaStream_t s) {
  return launch(f, g, b, sm, s);
}
EXPORT cudaError_t pretend___cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t sm, cudaStream_t s) {
  return launch(f, g, b, sm, s);
}
EXPORT cudaError_t pretend_cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void**, size_t sm,
                                                       cudaStream_t s) {
  return launch(f, g, b, sm, s);
}
EXPORT cudaError_t pretend_cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
// An operator that Python computes (operators.py), put onto a stream.
EXPORT int pretend_operator(void* s, const char* name) {
  launches++;
  {
    Lock lock(mutex());
    auto& f = functions()[(void*)name];
    if (f.name.empty()) f.name = std::string("aten::") + name;
    f.n++;
  }
  return stream_op((cudaStream_t)s, 0, name);
}
typedef void (*ReplayCallback)(long);
static ReplayCallback replay_callback = 0;
EXPORT void pretend_set_callback(ReplayCallback f) { replay_callback = f; }
EXPORT int pretend_captured() { return captured_node && !replaying ? 1 : 0; }
EXPORT void pretend_keep(long id) {
  on_replay([=] {
    if (replay_callback) replay_callback(id);
  });
}
EXPORT cudaError_t pretend___cudaGetKernel(const void** k, const void* f) {
  *k = f;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGetKernel(const void** k, const void* f) {
  *k = f;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGetFuncBySymbol(const void** k, const void* f) {
  *k = f;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaFuncGetAttributes(cudaFuncAttributes* a, const void* f) {
  Lock lock(mutex());
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = compute_capability_major() * 10 + compute_capability_minor();
  auto it = functions().find(f);
  a->maxDynamicSharedSizeBytes = it == functions().end() ? 49152 : it->second.dyn;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaFuncSetAttribute(const void* f, cudaFuncAttribute a, int v) {
  Lock lock(mutex());
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (v > 232448) {
      report("cudaFuncSetAttribute asks for %d bytes of shared memory", v);
      FAIL(cudaErrorInvalidValue);
    }
    auto it = functions().find(f);
    if (it != functions().end()) it->second.dyn = std::max(v, it->second.dyn);
  }
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaKernelSetAttributeForDevice(const void* f, cudaFuncAttribute a, int v, int) {
  return pretend_cudaFuncSetAttribute(f, a, v);
}
EXPORT cudaError_t pretend_cudaFuncGetName(const char** n, const void* f) {
  Lock lock(mutex());
  auto it = functions().find(f);
  *n = it == functions().end() ? "?" : it->second.name.c_str();
  return cudaSuccess;
}
cudaError_t occupancy(int* n, int b) {
  if (b <= 0) FAIL(cudaErrorInvalidValue);
  *n = std::max(1, std::min(32, 2048 / b));
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int b, size_t) {
  return occupancy(n, b);
}
EXPORT cudaError_t pretend_cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int b, size_t,
                                                                                  unsigned) {
  return occupancy(n, b);
}
EXPORT cudaError_t pretend_cudaOccupancyMaxPotentialClusterSize(int* n, const void*, const void*) {
  *n = 8;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaOccupancyMaxActiveClusters(int* n, const void*, const void*) {
  *n = 16;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaOccupancyAvailableDynamicSMemPerBlock(size_t* n, const void*, int, int) {
  *n = 49152;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaLibraryLoadData(void** l, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  *l = malloc(8);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaLibraryGetKernel(void** k, void*, const char* name) {
  Lock lock(mutex());
  char* p = (char*)malloc(8);
  functions()[p].name = name;
  *k = p;
  return cudaSuccess;
}
