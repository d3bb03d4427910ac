// SPDX-License-Identifier: Apache-2.0
// Handles, versions and attributes of cuBLAS, cuBLASLt, cuDNN, cuSPARSE, cuSOLVER, cuFFT; NVML.
#include "pretend.h"

static int create_handle(void** h) {
  *h = calloc(1, 1 << 12);
  return 0;
}
#define CREATES_HANDLE(n) \
  EXPORT int pretend_##n(void** h) { return create_handle(h); }
CREATES_HANDLE(cublasCreate_v2)
CREATES_HANDLE(cublasLtCreate)
CREATES_HANDLE(cudnnCreate) CREATES_HANDLE(cusparseCreate) CREATES_HANDLE(cusolverDnCreate)
    CREATES_HANDLE(cusolverDnCreateParams) CREATES_HANDLE(cudnnCreateTensorDescriptor)
        CREATES_HANDLE(cudnnCreateFilterDescriptor) CREATES_HANDLE(cudnnCreateConvolutionDescriptor)
            CREATES_HANDLE(cudnnCreateDropoutDescriptor) CREATES_HANDLE(cudnnCreateRNNDescriptor)
                CREATES_HANDLE(cufftCreate) CREATES_HANDLE(cusparseCreateMatDescr)
                    CREATES_HANDLE(cublasLtMatmulPreferenceCreate) EXPORT
    int pretend_cublasGetVersion_v2(void*, int* v) {
  *v = 130003;
  return 0;
}
EXPORT int pretend_cublasGetProperty(int t, int* v) {
  *v = t == 0 ? 13 : 0;
  return 0;
}
EXPORT size_t pretend_cublasLtGetVersion() { return 130003; }
EXPORT size_t pretend_cublasLtGetCudartVersion() { return 13000; }
EXPORT int pretend_cublasLtGetProperty(int t, int* v) {
  *v = t == 0 ? 13 : 0;
  return 0;
}
EXPORT const char* pretend_cublasGetStatusName(int) { return "CUBLAS_STATUS"; }
EXPORT const char* pretend_cublasGetStatusString(int) { return "CUBLAS_STATUS"; }
EXPORT const char* pretend_cublasLtGetStatusName(int) { return "CUBLAS_STATUS"; }
EXPORT const char* pretend_cublasLtGetStatusString(int) { return "CUBLAS_STATUS"; }
struct Handle {
  void* stream;
  int pmode, mmode;
};
EXPORT int pretend_cublasSetStream_v2(Handle* h, void* s) {
  h->stream = s;
  return 0;
}
EXPORT int pretend_cublasGetStream_v2(Handle* h, void** s) {
  *s = h->stream;
  return 0;
}
EXPORT int pretend_cublasSetPointerMode_v2(Handle* h, int m) {
  h->pmode = m;
  return 0;
}
EXPORT int pretend_cublasGetPointerMode_v2(Handle* h, int* m) {
  *m = h->pmode;
  return 0;
}
EXPORT int pretend_cublasSetMathMode(Handle* h, int m) {
  h->mmode = m;
  return 0;
}
EXPORT int pretend_cublasGetMathMode(Handle* h, int* m) {
  *m = h->mmode;
  return 0;
}
EXPORT size_t pretend_cudnnGetVersion() { return (size_t)setting("PRETEND_GPU_CUDNN", 91501); }
EXPORT size_t pretend_cudnnGetCudartVersion() { return 13000; }
EXPORT size_t pretend_cudnnGetMaxDeviceVersion() { return 900; }
EXPORT const char* pretend_cudnnGetErrorString(int) { return "CUDNN_STATUS"; }
EXPORT void pretend_cudnnGetLastErrorString(char* s, size_t n) {
  if (n) s[0] = 0;
}
EXPORT int pretend_cudnnSetStream(Handle* h, void* s) {
  h->stream = s;
  return 0;
}
EXPORT int pretend_cudnnGetStream(Handle* h, void** s) {
  *s = h->stream;
  return 0;
}
EXPORT const char* pretend_cusparseGetErrorString(int) { return "CUSPARSE_STATUS"; }
EXPORT const char* pretend_cusparseGetErrorName(int) { return "CUSPARSE_STATUS"; }
// cublasLt objects; layout: {type, rows, cols, ld, batch, stride, order}; desc: see D_
EXPORT int pretend_cublasLtMatrixLayoutInit_internal(MatrixLayout* l, size_t, int t, uint64_t r, uint64_t c,
                                                     int64_t ld) {
  memset(l, 0, sizeof *l);
  l->type = t;
  l->rows = r;
  l->cols = c;
  l->ld = ld;
  l->batch = 1;
  return 0;
}
EXPORT int pretend_cublasLtMatrixLayoutCreate(MatrixLayout** l, int t, uint64_t r, uint64_t c, int64_t ld) {
  *l = (MatrixLayout*)calloc(1, 256);
  return pretend_cublasLtMatrixLayoutInit_internal(*l, 0, t, r, c, ld);
}
EXPORT int pretend_cublasLtMatrixLayoutDestroy(void* l) {
  free(l);
  return 0;
}
EXPORT int pretend_cublasLtMatrixLayoutSetAttribute(MatrixLayout* l, int a, const void* v, size_t) {
  switch (a) {
    case 0: l->type = *(int*)v; break;
    case 1: l->order = *(int*)v; break;
    case 2: l->rows = *(uint64_t*)v; break;
    case 3: l->cols = *(uint64_t*)v; break;
    case 4: l->ld = *(int64_t*)v; break;
    case 5: l->batch = *(int*)v; break;
    case 6: l->stride = *(int64_t*)v; break;
  }
  return 0;
}
EXPORT int pretend_cublasLtMatmulDescInit_internal(MatmulDescription* m, size_t, int, int) {
  memset(m, 0, sizeof *m);
  return 0;
}
EXPORT int pretend_cublasLtMatmulDescCreate(MatmulDescription** m, int c, int s) {
  *m = (MatmulDescription*)calloc(1, 512);
  return pretend_cublasLtMatmulDescInit_internal(*m, 0, c, s);
}
EXPORT int pretend_cublasLtMatmulDescDestroy(void* m) {
  free(m);
  return 0;
}
EXPORT int pretend_cublasLtMatmulPreferenceDestroy(void* m) {
  free(m);
  return 0;
}
EXPORT int pretend_cublasLtMatmulDescSetAttribute(MatmulDescription* m, int a, const void* v, size_t) {
  if (a == 3) m->transposes_a = *(int*)v;
  if (a == 4) m->transposes_b = *(int*)v;
  return 0;
}
EXPORT int pretend_cublasLtMatmulDescGetAttribute(MatmulDescription*, int, void* v, size_t n, size_t* w) {
  memset(v, 0, n);
  if (w) *w = n;
  return 0;
}
EXPORT int pretend_cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int req, char* res,
                                                  int* ret) {
  if (req < 1) {
    *ret = 0;
    return 0;
  }
  memset(res, 0, 64 + 8 + 4 + 4 + 16);
  float w = 1;
  memcpy(res + 64 + 8 + 4, &w, 4);
  *ret = 1;
  return 0;
}
// Checks the operands, of which transformer_engine.py computes the product.
EXPORT int pretend_cublasLtMatmul(void*, MatmulDescription* m, const void*, const void* A, MatrixLayout* la, const void* B,
                                  MatrixLayout* lb, const void*, const void*, void*, const void* D, MatrixLayout* ld,
                                  void*, void*, size_t, cudaStream_t stream) {
  if (stream_op(stream, 0, "cublasLtMatmul")) return 14;
  Lock lock(mutex());
  launches++;
  auto& f = functions()[(void*)pretend_cublasLtMatmul];
  f.name = "cublasLtMatmul";
  f.n++;
  for (const void* q : {A, B, D})
    if (q && !find(q)) {
      report("cublasLtMatmul: %p is not known memory", q);
      return 7;
    }
  uint64_t rows_a = la->rows, cols_a = la->cols, rows_b = lb->rows, cols_b = lb->cols;
  if (m->transposes_a) std::swap(rows_a, cols_a);
  if (m->transposes_b) std::swap(rows_b, cols_b);
  if (cols_a == rows_b && rows_a == ld->rows && cols_b == ld->cols) return 0;
  report("cublasLtMatmul: shapes do not fit: op(A) %lux%lu op(B) %lux%lu D %lux%lu", rows_a, cols_a, rows_b, cols_b,
         ld->rows, ld->cols);
  return 7;
}

EXPORT int pretend_cudnnBackendCreateDescriptor(int t, void** d) {
  int* p = (int*)calloc(1, 256);
  p[0] = t;
  *d = p;
  return 0;
}
EXPORT int pretend_cudnnBackendDestroyDescriptor(void* d) {
  free(d);
  return 0;
}
EXPORT int pretend_cudnnBackendGetAttribute(void*, int attr, int type, int64_t want, int64_t* got, void* out) {
  if (attr >= 1303 && attr <= 1305) {
    if (got) *got = 0;
    return 0;
  }
  if (!out) {
    if (got) *got = attr == 202 ? 1 : 0;
    return 0;
  }
  if (type == 15) {
    if (got) *got = want > 0 ? 1 : 0;
    return 0;
  }
  if (attr == 405) {
    if (want > 0) ((char*)out)[0] = 0;
    if (got) *got = 1;
    return 0;
  }
  size_t z = type == 3 || type == 5 || type == 6 ? 8 : type == 2 || type == 24 ? 1 : 4;
  if (want > 0) memset(out, 0, z);
  if (got) *got = want > 0 ? 1 : 0;
  return 0;
}
EXPORT int pretend_cudnnBackendExecute(Handle* h, void*, void*) {
  {
    Lock lock(mutex());
    launches++;
    auto& f = functions()[(void*)pretend_cudnnBackendExecute];
    f.name = "cudnnBackendExecute";
    f.n++;
  }
  return stream_op((cudaStream_t)h->stream, 0, "cudnnBackendExecute") ? 5000 : 0;
}
// ---------------------------------------------------------------- NVML
EXPORT int pretend_nvmlInit() { return 0; }
EXPORT int pretend_nvmlInit_v2() { return 0; }
// NVML doesn't read CUDA_VISIBLE_DEVICES.
EXPORT int pretend_nvmlDeviceGetCount_v2(unsigned* n) {
  *n = machine_device_count();
  return 0;
}
EXPORT int pretend_nvmlDeviceGetCount(unsigned* n) { return pretend_nvmlDeviceGetCount_v2(n); }
EXPORT int pretend_nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) {
  *h = contexts + i;
  return 0;
}
EXPORT int pretend_nvmlDeviceGetHandleByPciBusId_v2(const char* s, void** h) {
  int d = 0;
  pretend_cudaDeviceGetByPCIBusId(&d, s);
  *h = contexts + d;
  return 0;
}
EXPORT int pretend_nvmlDeviceGetHandleByUUID(const char*, void** h) {
  *h = contexts;
  return 0;
}
EXPORT int pretend_nvmlDeviceGetIndex(void* h, unsigned* i) {
  *i = (char*)h - contexts;
  return 0;
}
EXPORT int pretend_nvmlDeviceGetName(void*, char* s, unsigned n) {
  snprintf(s, n, "%s", device_name());
  return 0;
}
EXPORT int pretend_nvmlDeviceGetUUID(void* h, char* s, unsigned n) {
  int d = (char*)h - contexts;
  unsigned b = 0x40 + d;
  snprintf(s, n, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b, b, b, b, b, b, b, b, b,
           b, b, b, b, b, b, b);
  return 0;
}
EXPORT int pretend_nvmlSystemGetDriverVersion(char* s, unsigned n) {
  snprintf(s, n, "580.65.06");
  return 0;
}
EXPORT int pretend_nvmlSystemGetCudaDriverVersion_v2(int* v) {
  *v = 13000;
  return 0;
}
EXPORT int pretend_nvmlDeviceGetCudaComputeCapability(void*, int* a, int* b) {
  *a = compute_capability_major();
  *b = compute_capability_minor();
  return 0;
}
EXPORT const char* pretend_nvmlErrorString(int) { return "nvml"; }
struct NvmlMemory {
  unsigned long long total, free, used;
};
EXPORT int pretend_nvmlDeviceGetMemoryInfo(void*, NvmlMemory* m) {
  size_t f, t;
  pretend_cudaMemGetInfo(&f, &t);
  m->total = t;
  m->free = f;
  m->used = t - f;
  return 0;
}
