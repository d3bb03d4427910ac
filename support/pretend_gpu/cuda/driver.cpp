// SPDX-License-Identifier: Apache-2.0
// The driver API: contexts, modules, and virtual memory, on the functions of the runtime.
#include "pretend.h"

static CUresult as_driver(cudaError_t e) { return (CUresult)(int)e; }
char contexts[64];
EXPORT CUresult pretend_cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult pretend_cuDriverGetVersion(int* v) { return as_driver(pretend_cudaDriverGetVersion(v)); }
EXPORT CUresult pretend_cuDeviceGet(CUdevice* d, int o) {
  if (o < 0 || o >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *d = o;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDeviceGetCount(int* n) {
  *n = device_count();
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDeviceGetName(char* s, int n, CUdevice) {
  snprintf(s, n, "%s", device_name());
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  *v = (int)attribute(a);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDeviceGetUuid_v2(CUuuid* u, CUdevice d) {
  memset(u, 0x40 + d, 16);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDeviceGetUuid(CUuuid* u, CUdevice d) { return pretend_cuDeviceGetUuid_v2(u, d); }
EXPORT CUresult pretend_cuDeviceTotalMem_v2(size_t* n, CUdevice) {
  *n = memory_limit();
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDeviceGetPCIBusId(char* s, int n, CUdevice d) {
  return as_driver(pretend_cudaDeviceGetPCIBusId(s, n, d));
}
EXPORT CUresult pretend_cuDeviceComputeCapability(int* a, int* b, CUdevice) {
  *a = compute_capability_major();
  *b = compute_capability_minor();
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  *c = (CUcontext)(contexts + d);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
  if (f) *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)(contexts + current_device);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuCtxSetCurrent(CUcontext c) {
  if (c) current_device = (char*)c - contexts;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuCtxPushCurrent_v2(CUcontext c) { return pretend_cuCtxSetCurrent(c); }
EXPORT CUresult pretend_cuCtxPopCurrent_v2(CUcontext* c) {
  if (c) *c = (CUcontext)(contexts + current_device);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuCtxGetDevice(CUdevice* d) {
  *d = current_device;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuCtxGetStreamPriorityRange(int* a, int* b) {
  return as_driver(pretend_cudaDeviceGetStreamPriorityRange(a, b));
}
EXPORT CUresult pretend_cuCtxCreate_v4(CUcontext* c, void*, unsigned, CUdevice d) {
  *c = (CUcontext)(contexts + d);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemGetInfo_v2(size_t* f, size_t* t) { return as_driver(pretend_cudaMemGetInfo(f, t)); }
EXPORT CUresult pretend_cuMemAlloc_v2(CUdeviceptr* p, size_t n) { return as_driver(pretend_cudaMalloc((void**)p, n)); }
EXPORT CUresult pretend_cuMemFree_v2(CUdeviceptr p) { return as_driver(pretend_cudaFree((void*)p)); }
EXPORT CUresult pretend_cuMemcpyHtoD_v2(CUdeviceptr d, const void* s, size_t n) {
  copy_bytes((void*)d, s, n);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemcpyDtoH_v2(void* d, CUdeviceptr s, size_t n) {
  copy_bytes(d, (void*)s, n);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) {
  copy_bytes((void*)d, (void*)s, n);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  Lock lock(mutex());
  Block* b = find((void*)p);
  if (!b) return CUDA_ERROR_INVALID_VALUE;
  switch (a) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(void**)v = contexts + b->dev; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)v = b->kind == cudaMemoryTypeHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void**)v = (void*)p; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)v = b->dev; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long*)v = (unsigned long long)b->base; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned*)v = 0; break;
    default: *(int*)v = 0;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuPointerGetAttributes(unsigned n, CUpointer_attribute* a, void** v, CUdeviceptr p) {
  for (unsigned i = 0; i < n; i++) pretend_cuPointerGetAttribute(v[i], a[i], p);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemGetAddressRange_v2(CUdeviceptr* b, size_t* n, CUdeviceptr p) {
  Lock lock(mutex());
  uintptr_t st;
  Block* k = find((void*)p, &st);
  if (!k) return CUDA_ERROR_NOT_FOUND;
  if (b) *b = st;
  if (n) *n = k->size;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuGetErrorString(CUresult e, const char** s) {
  *s = error_name(e);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuGetErrorName(CUresult e, const char** s) {
  *s = error_name(e);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuGetProcAddress_v2(const char* n, void** p, int, cuuint64_t,
                                            CUdriverProcAddressQueryResult* r) {
  *p = entry_point(n);
  if (r) *r = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuGetProcAddress(const char* n, void** p, int v, cuuint64_t f) {
  return pretend_cuGetProcAddress_v2(n, p, v, f, 0);
}
EXPORT CUresult pretend_cuGetExportTable(const void** t, const void*) {
  *t = 0;
  return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult pretend_cuModuleLoadData(CUmodule* m, const void*) {
  *m = (CUmodule)malloc(8);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuModuleLoad(CUmodule* m, const char*) {
  *m = (CUmodule)malloc(8);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, void*, void**) {
  *m = (CUmodule)malloc(8);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuModuleGetFunction(CUfunction* f, CUmodule, const char* n) {
  Lock lock(mutex());
  char* p = (char*)malloc(8);
  functions()[p].name = n;
  *f = (CUfunction)p;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuModuleGetGlobal_v2(CUdeviceptr* p, size_t* n, CUmodule, const char*) {
  if (p) *p = (CUdeviceptr)calloc(1, 65536);
  if (n) *n = 65536;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuLibraryLoadData(CUlibrary* m, const void*, void*, void**, unsigned, void*, void**, unsigned) {
  *m = (CUlibrary)malloc(8);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuLibraryGetKernel(CUkernel* f, CUlibrary, const char* n) {
  return pretend_cuModuleGetFunction((CUfunction*)f, 0, n);
}
EXPORT CUresult pretend_cuKernelGetFunction(CUfunction* f, CUkernel k) {
  *f = (CUfunction)k;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  return as_driver(pretend_cudaFuncSetAttribute(f, (cudaFuncAttribute)a, v));
}
EXPORT CUresult pretend_cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e,
                                       unsigned g, unsigned sm, CUstream s, void**, void**) {
  return as_driver(launch(f, dim3{a, b, c}, dim3{d, e, g}, sm, (cudaStream_t)s));
}
EXPORT CUresult pretend_cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  return as_driver(launch(f, dim3{c->gridDimX, c->gridDimY, c->gridDimZ},
                          dim3{c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, (cudaStream_t)c->hStream));
}
EXPORT CUresult pretend_cuLaunchCooperativeKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d,
                                                  unsigned e, unsigned g, unsigned sm, CUstream s, void**) {
  return as_driver(launch(f, dim3{a, b, c}, dim3{d, e, g}, sm, (cudaStream_t)s));
}
EXPORT CUresult pretend_cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int b, size_t) {
  return as_driver(occupancy(n, b));
}
EXPORT CUresult pretend_cuOccupancyMaxActiveClusters(int* n, CUfunction, const void*) {
  *n = 16;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuStreamGetCtx(CUstream, CUcontext* c) {
  *c = (CUcontext)(contexts + current_device);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuStreamSynchronize(CUstream s) {
  return as_driver(pretend_cudaStreamSynchronize((cudaStream_t)s));
}
EXPORT CUresult pretend_cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* o) {
  return as_driver(pretend_cudaStreamIsCapturing((cudaStream_t)s, (cudaStreamCaptureStatus*)o));
}
EXPORT CUresult pretend_cuStreamWriteValue32_v2(CUstream, CUdeviceptr p, unsigned v, unsigned) {
  *(volatile unsigned*)p = v;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuStreamWaitValue32_v2(CUstream, CUdeviceptr, unsigned, unsigned) { return CUDA_SUCCESS; }
// virtual memory management (expandable segments)
struct PhysicalMemory {
  size_t size;
  int fd;
  int dev;
};
EXPORT CUresult pretend_cuMemGetAllocationGranularity(size_t* n, const void*, int) {
  *n = 2 << 20;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  void* q = mmap(0, n + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (q == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *p = ((uintptr_t)q + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemAddressFree(CUdeviceptr p, size_t n) {
  munmap((void*)p, n);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp* pr,
                                    unsigned long long) {
  Lock lock(mutex());
  int d = pr->location.id;
  if (d < 0 || d >= device_count()) d = 0;
  if (used[d] + n > memory_limit()) return CUDA_ERROR_OUT_OF_MEMORY;
  int fd = syscall(SYS_memfd_create, "pretend_gpu", 1u);
  if (fd < 0 || ftruncate(fd, n)) return CUDA_ERROR_OUT_OF_MEMORY;
  used[d] += n;
  *h = (CUmemGenericAllocationHandle) new PhysicalMemory{n, fd, d};
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemRelease(CUmemGenericAllocationHandle h) {
  Lock lock(mutex());
  auto v = (PhysicalMemory*)h;
  used[v->dev] -= v->size;
  close(v->fd);
  delete v;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemMap(CUdeviceptr p, size_t n, size_t o, CUmemGenericAllocationHandle h,
                                 unsigned long long) {
  Lock lock(mutex());
  auto v = (PhysicalMemory*)h;
  void* q = mmap((void*)p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, v->fd, o);
  if (q == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  blocks()[p] = Block{n, cudaMemoryTypeDevice, v->dev, -1, q};
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemUnmap(CUdeviceptr p, size_t n) {
  Lock lock(mutex());
  blocks().erase(p);
  void* q = mmap((void*)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  (void)q;
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemExportToShareableHandle(void* o, CUmemGenericAllocationHandle h, int, unsigned long long) {
  *(int*)o = dup(((PhysicalMemory*)h)->fd);
  return CUDA_SUCCESS;
}
EXPORT CUresult pretend_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* h, void* fd, int) {
  struct stat s;
  int f = dup((int)(intptr_t)fd);
  if (fstat(f, &s)) return CUDA_ERROR_INVALID_VALUE;
  *h = (CUmemGenericAllocationHandle) new PhysicalMemory{(size_t)s.st_size, f, current_device};
  used[current_device] += s.st_size;
  return CUDA_SUCCESS;
}
