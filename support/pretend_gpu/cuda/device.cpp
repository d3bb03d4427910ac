// SPDX-License-Identifier: Apache-2.0
// An H100 as the runtime describes it; errors by name; driver functions by name.
#include "pretend.h"

EXPORT cudaError_t pretend_cudaGetDeviceCount(int* n) {
  *n = device_count();
  if (!*n) FAIL(cudaErrorNoDevice);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGetDevice(int* d) {
  *d = current_device;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaSetDevice(int d) {
  if (d < 0 || d >= device_count()) FAIL(cudaErrorInvalidDevice);
  current_device = d;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDriverGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
long attribute(int a) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrCanMapHostMemory: return 1;
    case cudaDevAttrConcurrentKernels: return 1;
    case cudaDevAttrEccEnabled: return 1;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return compute_capability_major();
    case cudaDevAttrComputeCapabilityMinor: return compute_capability_minor();
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrHostNativeAtomicSupported: return 0;
    case cudaDevAttrConcurrentManagedAccess: return 1;
    case cudaDevAttrComputePreemptionSupported: return 1;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: return 1;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrHostRegisterSupported: return 1;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMaxPersistingL2CacheSize: return 32768000;
    case cudaDevAttrMaxAccessPolicyWindowSize: return 134213632;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMemoryPoolsSupported: return 1;
    case cudaDevAttrIpcEventSupport: return 1;
    case cudaDevAttrClusterLaunch: return 1;
    case cudaDevAttrPciBusId: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: return 1;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: return 0;
    default: return 0;
  }
}
EXPORT cudaError_t pretend_cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  if (d < 0 || d >= device_count()) FAIL(cudaErrorInvalidDevice);
  *v = (int)attribute(a);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d < 0 || d >= device_count()) FAIL(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strcpy(p->name, device_name());
  memset(p->uuid.bytes, 0x40 + d, 16);
  p->totalGlobalMem = memory_limit();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = compute_capability_major();
  p->minor = compute_capability_minor();
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = 132;
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->ECCEnabled = 1;
  p->pciBusID = 1 + d;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 52428800;
  p->persistingL2CacheMaxSize = 32768000;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->concurrentManagedAccess = 1;
  p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = 232448;
  p->maxBlocksPerMultiProcessor = 32;
  p->accessPolicyMaxWindowSize = 134213632;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = p->memoryPoolsSupported = p->ipcEventSupported = p->clusterLaunch = 1;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:%02X:00.0", d + 1);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDeviceGetByPCIBusId(int* d, const char* s) {
  unsigned a, b = 1;
  if (sscanf(s, "%x:%x", &a, &b) < 1) FAIL(cudaErrorInvalidValue);
  *d = (int)b - 1;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDeviceGetStreamPriorityRange(int* lo, int* hi) {
  if (lo) *lo = 0;
  if (hi) *hi = -5;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDeviceCanAccessPeer(int* c, int a, int b) {
  *c = a != b;
  return cudaSuccess;
}
static unsigned char pools[64];
EXPORT cudaError_t pretend_cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int d) {
  *p = (cudaMemPool_t)(pools + d);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDeviceGetMemPool(cudaMemPool_t* p, int d) {
  *p = (cudaMemPool_t)(pools + d);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemPoolCreate(cudaMemPool_t* p, const void*) {
  *p = (cudaMemPool_t)malloc(8);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) {
  *(uint64_t*)v = 0;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDeviceGetLimit(size_t* v, cudaLimit) {
  *v = 1 << 20;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaDeviceGetCacheConfig(cudaFuncCache* v) {
  *v = cudaFuncCachePreferNone;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGetDeviceFlags(unsigned* f) {
  *f = 0;
  return cudaSuccess;
}

// Programs ask for driver functions by name. One that has no behaviour here gets a function that returns success.
static CUresult succeed() { return CUDA_SUCCESS; }

void* entry_point(const char* name) {
  for (auto suffix : {"_v4", "_v3", "_v2", ""})
    if (void* function = dlsym(RTLD_DEFAULT, ("pretend_" + std::string(name) + suffix).c_str())) return function;
  return (void*)succeed;
}
EXPORT cudaError_t pretend_cudaGetDriverEntryPointByVersion(const char* n, void** p, unsigned, unsigned long long,
                                                            cudaDriverEntryPointQueryResult* r) {
  *p = entry_point(n);
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGetDriverEntryPoint(const char* n, void** p, unsigned long long f,
                                                   cudaDriverEntryPointQueryResult* r) {
  return pretend_cudaGetDriverEntryPointByVersion(n, p, 0, f, r);
}
