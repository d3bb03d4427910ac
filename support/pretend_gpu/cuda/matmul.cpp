// SPDX-License-Identifier: Apache-2.0
// cublasLtMatmul, which Transformer Engine calls: a real and slow matrix product.
#include "pretend.h"

static void to_float(const void* p, int type, uint64_t rows, uint64_t cols, int64_t ld, std::vector<float>& o,
                     float sc) {
  o.resize(rows * cols);
  for (uint64_t j = 0; j < cols; j++)
    for (uint64_t i = 0; i < rows; i++) {
      size_t k = j * ld + i;
      float v = 0;
      switch (type) {
        case 0: v = ((float*)p)[k]; break;
        case 2: v = half_to_float(((uint16_t*)p)[k]); break;
        case 14: v = bfloat16_to_float(((uint16_t*)p)[k]); break;
        case 28: v = e4m3_to_float(((uint8_t*)p)[k]); break;
        case 29: v = e5m2_to_float(((uint8_t*)p)[k]); break;
        case 1: v = ((double*)p)[k]; break;
      }
      o[j * rows + i] = v * sc;
    }
}
static void from_float(void* p, int type, size_t k, float v) {
  switch (type) {
    case 0: ((float*)p)[k] = v; break;
    case 2: ((uint16_t*)p)[k] = float_to_half(v); break;
    case 14: ((uint16_t*)p)[k] = float_to_bfloat16(v); break;
    case 1: ((double*)p)[k] = v; break;
  }
}
static float from_any(const void* p, int type, size_t k) {
  switch (type) {
    case 0: return ((float*)p)[k];
    case 2: return half_to_float(((uint16_t*)p)[k]);
    case 14: return bfloat16_to_float(((uint16_t*)p)[k]);
    case 1: return ((double*)p)[k];
  }
  return 0;
}
EXPORT int pretend_cublasLtMatmul(void*, MatmulDescription* m, const float* alpha, const void* A, MatrixLayout* la,
                                  const void* B, MatrixLayout* lb, const float* beta, const void* Cp, MatrixLayout* lc,
                                  void* Dp, MatrixLayout* ld, void*, void*, size_t, cudaStream_t st) {
  if (stream_op(st, 0, "cublasLtMatmul")) return 14;
  {
    Lock lock(mutex());
    launches++;
    auto& f = functions()[(void*)pretend_cublasLtMatmul];
    f.name = "cublasLtMatmul";
    f.n++;
    for (const void* q : {A, B, (const void*)Dp})
      if (q && !find(q)) {
        report("cublasLtMatmul: %p is not known memory", q);
        return 7;
      }
  }
  static int on = setting("PRETEND_GPU_GEMM", 1);
  if (!on) return 0;
  if (captured_node && !replaying) {
    MatmulDescription m2 = *m;
    MatrixLayout a2 = *la, b2 = *lb, c2 = lc ? *lc : *ld, d2 = *ld;
    float al2 = alpha ? *alpha : 1, be2 = beta ? *beta : 0;
    on_replay([=] {
      MatmulDescription mm = m2;
      MatrixLayout x = a2, y = b2, z = c2, w = d2;
      float p = al2, q = be2;
      pretend_cublasLtMatmul(0, &mm, &p, A, &x, B, &y, &q, Cp, &z, Dp, &w, 0, 0, 0, st);
    });
    return 0;
  }
  uint64_t M = ld->rows, N = ld->cols, K = m->ta ? la->rows : la->cols, Kb = m->tb ? lb->cols : lb->rows;
  uint64_t Ma = m->ta ? la->cols : la->rows, Nb = m->tb ? lb->rows : lb->cols;
  if (K != Kb || Ma != M || Nb != N) {
    report("cublasLtMatmul: shapes do not fit: op(A) %lux%lu op(B) %lux%lu D %lux%lu", Ma, K, Kb, Nb, M, N);
    return 7;
  }
  float al = alpha ? *alpha : 1, be = beta ? *beta : 0, sa = m->as && !m->asmode && la->type >= 28 ? *(float*)m->as : 1,
        sb = m->bs && !m->bsmode && lb->type >= 28 ? *(float*)m->bs : 1,
        sd = m->ds && ld->type >= 28 ? *(float*)m->ds : 1;
  (void)sd;
  int nb = std::max(1, ld->batch);
  for (int bt = 0; bt < nb; bt++) {
    std::vector<float> a, b;
    size_t za = la->type == 0    ? 4
                : la->type >= 28 ? 1
                                 : 2,
           zb = lb->type == 0    ? 4
                : lb->type >= 28 ? 1
                                 : 2,
           zd = ld->type == 0    ? 4
                : ld->type >= 28 ? 1
                                 : 2;
    to_float((char*)A + bt * la->stride * za, la->type, la->rows, la->cols, la->ld, a, sa);
    to_float((char*)B + bt * lb->stride * zb, lb->type, lb->rows, lb->cols, lb->ld, b, sb);
    std::vector<float> ar(M * K);
    for (uint64_t i = 0; i < M; i++)
      for (uint64_t k = 0; k < K; k++) ar[i * K + k] = m->ta ? a[i * la->rows + k] : a[k * la->rows + i];
    std::vector<float> bc(N * K);
    for (uint64_t j = 0; j < N; j++)
      for (uint64_t k = 0; k < K; k++) bc[j * K + k] = m->tb ? b[k * lb->rows + j] : b[j * lb->rows + k];
    char* d = (char*)Dp + bt * ld->stride * zd;
    const char* c = Cp ? (const char*)Cp + bt * (lc ? lc->stride : 0) * zd : 0;
    int bty = m->biastype >= 0 ? m->biastype : ld->type >= 28 ? 14 : ld->type;
    for (uint64_t j = 0; j < N; j++)
      for (uint64_t i = 0; i < M; i++) {
        const float *x = &ar[i * K], *y = &bc[j * K];
        float v = 0;
        for (uint64_t k = 0; k < K; k++) v += x[k] * y[k];
        v *= al;
        size_t o = j * ld->ld + i;
        if (be != 0 && c) v += be * from_any(c, lc->type, j * lc->ld + i);
        if ((m->epi & 4) && m->bias) v += from_any(m->bias, bty, i);
        if (m->epi & 32) {
          if ((m->epi & 128) && m->aux)
            from_float(m->aux, m->auxtype >= 0 ? m->auxtype : ld->type, j * m->auxld + i, v);
          v = 0.5f * v * (1 + __builtin_tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
        }
        if (m->epi & 2) v = v > 0 ? v : 0;
        from_float(d, ld->type, o, v);
      }
    if ((m->epi & 512) && m->bias)
      for (uint64_t j = 0; j < N; j++) {
        float v = 0;
        for (uint64_t k = 0; k < K; k++) v += bc[j * K + k];
        from_float(m->bias, bty, j, v);
      }
    if ((m->epi & 256) && m->bias)
      for (uint64_t i = 0; i < M; i++) {
        float v = 0;
        for (uint64_t k = 0; k < K; k++) v += ar[i * K + k];
        from_float(m->bias, bty, i, v);
      }
  }
  return 0;
}
