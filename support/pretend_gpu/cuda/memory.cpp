// SPDX-License-Identifier: Apache-2.0
// Device memory is memfds, so that it can be shared between processes; copies are memmove.
#include "pretend.h"

std::map<uintptr_t, Block>& blocks() {
  static auto* b = new std::map<uintptr_t, Block>;
  return *b;
}
size_t used[64];
Block* find(const void* p, uintptr_t* start) {
  auto& b = blocks();
  auto it = b.upper_bound((uintptr_t)p);
  if (it == b.begin()) return 0;
  --it;
  if ((uintptr_t)p >= it->first + it->second.size) return 0;
  if (start) *start = it->first;
  return &it->second;
}
static void* map_memfd(size_t n, int* fd) {
  *fd = syscall(SYS_memfd_create, "pretend_gpu", 1u);
  if (*fd < 0 || ftruncate(*fd, n)) {
    if (*fd >= 0) close(*fd);
    return 0;
  }
  void* p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *fd, 0);
  if (p == MAP_FAILED) {
    close(*fd);
    return 0;
  }
  return p;
}
cudaError_t allocate(void** p, size_t n) {
  if (!p) FAIL(cudaErrorInvalidValue);
  *p = 0;
  if (!n) return cudaSuccess;
  Lock lock(mutex());
  if (used[current_device] + n > memory_limit()) FAIL(cudaErrorMemoryAllocation);
  int fd;
  size_t m = (n + 4095) & ~(size_t)4095;
  void* q = map_memfd(m, &fd);
  if (!q) FAIL(cudaErrorMemoryAllocation);
  used[current_device] += n;
  blocks()[(uintptr_t)q] = Block{n, cudaMemoryTypeDevice, current_device, fd, q};
  *p = q;
  return cudaSuccess;
}
cudaError_t free_any(void* p) {
  if (!p) return cudaSuccess;
  Lock lock(mutex());
  auto it = blocks().find((uintptr_t)p);
  if (it == blocks().end()) FAIL(cudaErrorInvalidValue);
  Block b = it->second;
  blocks().erase(it);
  if (b.kind == cudaMemoryTypeDevice || b.kind == cudaMemoryTypeManaged) {
    if (b.dev >= 0) used[b.dev] -= b.size;
    munmap(p, (b.size + 4095) & ~(size_t)4095);
    if (b.fd >= 0) close(b.fd);
  } else if (b.fd == HOST_ALLOCATED)
    free(p);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMalloc(void** p, size_t n) {
  if (cudaError_t e = capture_unsafe("cudaMalloc")) return e;
  return allocate(p, n);
}
EXPORT cudaError_t pretend_cudaFree(void* p) {
  if (p)
    if (cudaError_t e = capture_unsafe("cudaFree")) return e;
  return free_any(p);
}
EXPORT cudaError_t pretend_cudaMallocAsync(void** p, size_t n, cudaStream_t) { return allocate(p, n); }
EXPORT cudaError_t pretend_cudaMallocFromPoolAsync(void** p, size_t n, cudaMemPool_t, cudaStream_t) {
  return allocate(p, n);
}
EXPORT cudaError_t pretend_cudaFreeAsync(void* p, cudaStream_t) { return free_any(p); }
EXPORT cudaError_t pretend_cudaMallocManaged(void** p, size_t n, unsigned) {
  cudaError_t e = allocate(p, n);
  if (!e && *p) {
    Lock lock(mutex());
    blocks()[(uintptr_t)*p].kind = cudaMemoryTypeManaged;
  }
  return e;
}
EXPORT cudaError_t pretend_cudaMallocPitch(void** p, size_t* pitch, size_t w, size_t h) {
  *pitch = (w + 511) & ~(size_t)511;
  return allocate(p, *pitch * h);
}
EXPORT cudaError_t pretend_cudaHostAlloc(void** p, size_t n, unsigned) {
  if (cudaError_t e = capture_unsafe("cudaHostAlloc")) return e;
  void* q = 0;
  if (n && posix_memalign(&q, 4096, n)) FAIL(cudaErrorMemoryAllocation);
  *p = q;
  if (q) {
    Lock lock(mutex());
    blocks()[(uintptr_t)q] = Block{n, cudaMemoryTypeHost, current_device, HOST_ALLOCATED, q};
  }
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMallocHost(void** p, size_t n) { return pretend_cudaHostAlloc(p, n, 0); }
EXPORT cudaError_t pretend_cudaFreeHost(void* p) { return free_any(p); }
EXPORT cudaError_t pretend_cudaHostRegister(void* p, size_t n, unsigned) {
  Lock lock(mutex());
  if (!p || !n) FAIL(cudaErrorInvalidValue);
  if (find(p)) FAIL(cudaErrorHostMemoryAlreadyRegistered);
  blocks()[(uintptr_t)p] = Block{n, cudaMemoryTypeHost, current_device, HOST_REGISTERED, p};
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaHostUnregister(void* p) {
  Lock lock(mutex());
  auto it = blocks().find((uintptr_t)p);
  if (it == blocks().end() || it->second.fd != HOST_REGISTERED) FAIL(cudaErrorHostMemoryNotRegistered);
  blocks().erase(it);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaHostGetDevicePointer(void** d, void* h, unsigned) {
  *d = h;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaHostGetFlags(unsigned* f, void*) {
  *f = 0;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemGetInfo(size_t* f, size_t* t) {
  Lock lock(mutex());
  size_t lim = memory_limit();
  *t = lim;
  size_t ctx = (size_t)500 << 20;
  size_t u = used[current_device] + ctx;
  *f = u < lim ? lim - u : 0;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock(mutex());
  memset(a, 0, sizeof *a);
  Block* b = find(p);
  if (!b) {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    a->hostPointer = (void*)p;
    return cudaSuccess;
  }
  a->type = (cudaMemoryType)b->kind;
  a->device = b->dev;
  a->devicePointer = (void*)p;
  a->hostPointer = b->kind == cudaMemoryTypeDevice ? 0 : (void*)p;
  return cudaSuccess;
}

struct IpcHandle {
  int pid, fd;
  uint64_t size;
  uint64_t magic;
};
EXPORT cudaError_t pretend_cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) {
  Lock lock(mutex());
  uintptr_t st;
  Block* b = find(p, &st);
  if (!b || b->fd < 0) FAIL(cudaErrorInvalidValue);
  memset(h, 0, sizeof *h);
  IpcHandle i{getpid(), b->fd, b->size, 0x697063};
  memcpy(h, &i, sizeof i);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned) {
  Lock lock(mutex());
  IpcHandle i;
  memcpy(&i, &h, sizeof i);
  if (i.magic != 0x697063) FAIL(cudaErrorInvalidValue);
  if (i.pid == getpid()) FAIL(cudaErrorDeviceUninitialized);
  char b[64];
  snprintf(b, 64, "/proc/%d/fd/%d", i.pid, i.fd);
  int fd = open(b, O_RDWR);
  if (fd < 0) FAIL(cudaErrorMapBufferObjectFailed);
  size_t m = (i.size + 4095) & ~(size_t)4095;
  void* q = mmap(0, m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (q == MAP_FAILED) FAIL(cudaErrorMapBufferObjectFailed);
  Block x{i.size, cudaMemoryTypeDevice, current_device, fd, q};
  used[current_device] += i.size;
  blocks()[(uintptr_t)q] = x;
  *p = q;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaIpcCloseMemHandle(void* p) { return free_any(p); }
EXPORT cudaError_t pretend_cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t e) {
  auto x = event_of(e);
  if (!x || !(x->flags & cudaEventInterprocess)) FAIL(cudaErrorInvalidResourceHandle);
  memset(h, 7, sizeof *h);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t) {
  cudaError_t r = pretend_cudaEventCreateWithFlags(e, cudaEventDisableTiming | cudaEventInterprocess);
  event_of(*e)->rec = true;
  return r;
}

// copies
void copy_bytes(void* d, const void* s, size_t n) {
  if (n) memmove(d, s, n);
}
EXPORT cudaError_t pretend_cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  if (cudaError_t e = capture_unsafe("cudaMemcpy")) return e;
  if (cudaError_t e = stream_op(0, 1, __func__)) return e;
  copy_bytes(d, s, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st) {
  {
    Lock lock(mutex());
    auto x = stream_of(st);
    if (x && x->cap && n) {
      Block *a = find(d), *b = find(s);
      bool pageable = (!a && k != cudaMemcpyDeviceToDevice) || (!b && k != cudaMemcpyDeviceToDevice);
      if (pageable) {
        report("capture: copy %s pageable memory (%zu bytes)", a ? "from" : "to", n);
        return invalidate(x->cap, cudaErrorStreamCaptureUnsupported, __func__);
      }
    }
  }
  if (cudaError_t e = stream_op(st, 1, __func__)) return e;
  if (captured_node) {
    on_replay([=] { copy_bytes(d, s, n); });
    return cudaSuccess;
  }
  copy_bytes(d, s, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  if (cudaError_t e = stream_op(st, 1, __func__)) return e;
  copy_bytes(d, s, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) {
  copy_bytes(d, s, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h,
                                             cudaMemcpyKind, cudaStream_t st) {
  if (cudaError_t e = stream_op(st, 1, __func__)) return e;
  for (size_t i = 0; i < h; i++) copy_bytes((char*)d + i * dp, (const char*)s + i * sp, w);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h,
                                        cudaMemcpyKind) {
  for (size_t i = 0; i < h; i++) copy_bytes((char*)d + i * dp, (const char*)s + i * sp, w);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemset(void* d, int v, size_t n) {
  if (cudaError_t e = stream_op(0, 2, __func__)) return e;
  if (n) memset(d, v, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t s) {
  if (cudaError_t e = stream_op(s, 2, __func__)) return e;
  if (captured_node) {
    on_replay([=] {
      if (n) memset(d, v, n);
    });
    return cudaSuccess;
  }
  if (n) memset(d, v, n);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemset2DAsync(void* d, size_t p, int v, size_t w, size_t h, cudaStream_t s) {
  if (cudaError_t e = stream_op(s, 2, __func__)) return e;
  for (size_t i = 0; i < h; i++) memset((char*)d + i * p, v, w);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemcpyBatchAsync(void** d, const void** s, const size_t* n, size_t k, const void*,
                                                const void*, size_t, cudaStream_t st) {
  if (cudaError_t e = stream_op(st, 1, __func__)) return e;
  for (size_t i = 0; i < k; i++) copy_bytes(d[i], s[i], n[i]);
  return cudaSuccess;
}
