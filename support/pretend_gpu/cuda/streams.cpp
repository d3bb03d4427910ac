// SPDX-License-Identifier: Apache-2.0
// Streams and events do everything at once, in order. Captures follow CUDA's rules; a graph holds what was put onto its
// streams.
#include "pretend.h"

thread_local Node* captured_node = 0;
thread_local bool replaying = false;
static std::set<Stream*>& streams() {
  static auto* s = new std::set<Stream*>;
  return *s;
}
static std::set<Event*>& events() {
  static auto* s = new std::set<Event*>;
  return *s;
}
static std::set<Capture*>& captures() {
  static auto* s = new std::set<Capture*>;
  return *s;
}
static std::atomic<uint64_t> next_id{10};
static thread_local int capture_mode = cudaStreamCaptureModeGlobal;
Stream* stream_of(cudaStream_t s) {  // null, legacy, per thread handles map to one object per device
  Lock lock(mutex());
  uintptr_t h = (uintptr_t)s;
  if (h <= 2) {
    static Stream* d[64];
    if (!d[current_device]) {
      d[current_device] = new Stream;
      d[current_device]->dev = current_device;
      d[current_device]->id = 1;
    }
    return d[current_device];
  }
  return streams().count((Stream*)s) ? (Stream*)s : 0;
}
Event* event_of(cudaEvent_t e) {
  Lock lock(mutex());
  return events().count((Event*)e) ? (Event*)e : 0;
}
cudaError_t invalidate(Capture* c, cudaError_t e, const char* w) {
  c->status = cudaStreamCaptureStatusInvalidated;
  return fail(e, w);
}
cudaError_t capture_unsafe(const char* what) {  // calls that are not allowed while a global mode capture goes on
  Lock lock(mutex());
  if (captures().empty() || capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto c : captures()) {
    bool mine = pthread_equal(c->thread, pthread_self());
    if (c->mode == cudaStreamCaptureModeRelaxed) continue;
    if (mine || (c->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal))
      return invalidate(c, cudaErrorStreamCaptureUnsupported, what);
  }
  return cudaSuccess;
}
cudaError_t stream_op(cudaStream_t s, int type, const char* what,
                      Node** out) {  // an asynchronous operation goes onto s
  if (replaying) return cudaSuccess;
  Lock lock(mutex());
  captured_node = 0;
  Stream* st = stream_of(s);
  if (!st) return fail(cudaErrorInvalidResourceHandle, what);
  if (!st->cap) {
    if ((uintptr_t)s <= 1)
      for (auto c : captures())
        if (!(c->origin->flags & cudaStreamNonBlocking) && c->mode != cudaStreamCaptureModeRelaxed)
          return invalidate(c, cudaErrorStreamCaptureImplicit, what);
    return cudaSuccess;
  }
  if (st->cap->status == cudaStreamCaptureStatusInvalidated) return fail(cudaErrorStreamCaptureInvalidated, what);
  Node* n = new Node;
  n->type = type;
  n->up.assign(st->tips.begin(), st->tips.end());
  st->cap->g->nodes.push_back(n);
  st->tips = {n};
  captured_node = n;
  if (out) *out = n;
  return cudaSuccess;
}
static cudaError_t new_stream(cudaStream_t* s, unsigned flags, int prio) {
  Lock lock(mutex());
  auto x = new Stream;
  x->dev = current_device;
  x->flags = flags;
  x->prio = prio < -5 ? -5 : prio > 0 ? 0 : prio;
  x->id = next_id++;
  streams().insert(x);
  *s = (cudaStream_t)x;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamCreate(cudaStream_t* s) { return new_stream(s, 0, 0); }
EXPORT cudaError_t pretend_cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return new_stream(s, f, 0); }
EXPORT cudaError_t pretend_cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int p) {
  return new_stream(s, f, p);
}
EXPORT cudaError_t pretend_cudaStreamDestroy(cudaStream_t s) {
  Lock lock(mutex());
  if ((uintptr_t)s <= 2 || !streams().erase((Stream*)s)) FAIL(cudaErrorInvalidResourceHandle);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamGetPriority(cudaStream_t s, int* p) {
  auto x = stream_of(s);
  if (!x) FAIL(cudaErrorInvalidResourceHandle);
  *p = x->prio;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamGetFlags(cudaStream_t s, unsigned* p) {
  auto x = stream_of(s);
  if (!x) FAIL(cudaErrorInvalidResourceHandle);
  *p = x->flags;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamGetId(cudaStream_t s, unsigned long long* p) {
  auto x = stream_of(s);
  if (!x) FAIL(cudaErrorInvalidResourceHandle);
  *p = x->id;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamGetDevice(cudaStream_t s, int* d) {
  auto x = stream_of(s);
  if (!x) FAIL(cudaErrorInvalidResourceHandle);
  *d = x->dev;
  return cudaSuccess;
}
static cudaError_t sync_stream(cudaStream_t s, const char* w) {
  Lock lock(mutex());
  auto x = stream_of(s);
  if (!x) return fail(cudaErrorInvalidResourceHandle, w);
  if (x->cap) return invalidate(x->cap, cudaErrorStreamCaptureUnsupported, w);
  return capture_unsafe(w);
}
EXPORT cudaError_t pretend_cudaStreamSynchronize(cudaStream_t s) { return sync_stream(s, __func__); }
EXPORT cudaError_t pretend_cudaStreamQuery(cudaStream_t s) { return sync_stream(s, __func__); }
EXPORT cudaError_t pretend_cudaDeviceSynchronize() {
  Lock lock(mutex());
  for (auto c : captures())
    if (pthread_equal(c->thread, pthread_self()) || c->mode == cudaStreamCaptureModeGlobal)
      return invalidate(c, cudaErrorStreamCaptureUnsupported, __func__);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) {
  Lock lock(mutex());
  auto x = new Event;
  x->flags = f;
  x->dev = current_device;
  events().insert(x);
  *e = (cudaEvent_t)x;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaEventCreate(cudaEvent_t* e) { return pretend_cudaEventCreateWithFlags(e, 0); }
EXPORT cudaError_t pretend_cudaEventDestroy(cudaEvent_t e) {
  Lock lock(mutex());
  if (!events().erase((Event*)e)) FAIL(cudaErrorInvalidResourceHandle);
  delete (Event*)e;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
  Lock lock(mutex());
  auto x = event_of(e);
  auto st = stream_of(s);
  if (!x || !st) FAIL(cudaErrorInvalidResourceHandle);
  if (x->dev != st->dev) {
    report("event of device %d recorded on a stream of device %d", x->dev, st->dev);
    FAIL(cudaErrorInvalidResourceHandle);
  }
  if (st->cap) {
    if (f & cudaEventRecordExternal) return stream_op(s, 1, __func__);
    x->cap = st->cap;
    x->capid = st->cap->id;
    x->tips = st->tips;
    x->rec = true;
    return cudaSuccess;
  }
  if ((uintptr_t)s <= 1)
    if (cudaError_t er = stream_op(s, 1, __func__)) return er;
  x->cap = 0;
  x->rec = true;
  x->t = now();
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  return pretend_cudaEventRecordWithFlags(e, s, 0);
}
static cudaError_t wait_for_event(cudaEvent_t e, const char* w) {
  Lock lock(mutex());
  auto x = event_of(e);
  if (!x) return fail(cudaErrorInvalidResourceHandle, w);
  if (x->cap && captures().count(x->cap)) return invalidate(x->cap, cudaErrorCapturedEvent, w);
  if (x->cap) return fail(cudaErrorCapturedEvent, w);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaEventQuery(cudaEvent_t e) {
  if (cudaError_t r = capture_unsafe("cudaEventQuery")) return r;
  return wait_for_event(e, __func__);
}
EXPORT cudaError_t pretend_cudaEventSynchronize(cudaEvent_t e) {
  if (cudaError_t r = capture_unsafe("cudaEventSynchronize")) return r;
  return wait_for_event(e, __func__);
}
EXPORT cudaError_t pretend_cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  Lock lock(mutex());
  auto x = event_of(a), y = event_of(b);
  *ms = 0;
  if (!x || !y) FAIL(cudaErrorInvalidResourceHandle);
  if (x->cap || y->cap) FAIL(cudaErrorInvalidValue);
  if (!x->rec || !y->rec || (x->flags & cudaEventDisableTiming) || (y->flags & cudaEventDisableTiming))
    FAIL(cudaErrorInvalidResourceHandle);
  *ms = (y->t - x->t) * 1e3;
  if (*ms == 0) *ms = 0.0005f;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
  Lock lock(mutex());
  auto x = event_of(e);
  auto st = stream_of(s);
  if (!x || !st) FAIL(cudaErrorInvalidResourceHandle);
  if (x->cap && x->rec) {
    if (!captures().count(x->cap) || x->cap->id != x->capid) FAIL(cudaErrorInvalidValue);
    if (st->cap && st->cap != x->cap) {
      invalidate(st->cap, cudaErrorStreamCaptureMerge, __func__);
      FAIL(cudaErrorStreamCaptureMerge);
    }
    if (!st->cap) {
      if ((uintptr_t)s <= 1) return invalidate(x->cap, cudaErrorStreamCaptureImplicit, __func__);
      st->cap = x->cap;
      st->cap->members.insert(st);
      st->tips.clear();
    }
    st->tips.insert(x->tips.begin(), x->tips.end());
    return cudaSuccess;
  }
  if (st->cap && x->rec && !(f & cudaEventWaitExternal))
    return invalidate(st->cap, cudaErrorStreamCaptureIsolation, __func__);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode m) {
  Lock lock(mutex());
  auto st = stream_of(s);
  if (!st) FAIL(cudaErrorInvalidResourceHandle);
  if ((uintptr_t)s <= 1) FAIL(cudaErrorStreamCaptureUnsupported);
  if (st->cap) FAIL(cudaErrorIllegalState);
  auto c = new Capture;
  c->id = next_id++;
  c->mode = m;
  c->origin = st;
  c->g = new Graph;
  c->thread = pthread_self();
  c->members.insert(st);
  st->cap = c;
  st->tips.clear();
  captures().insert(c);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t g, const void*, const void*,
                                                         size_t, cudaStreamCaptureMode m) {
  cudaError_t e = pretend_cudaStreamBeginCapture(s, m);
  if (!e) stream_of(s)->cap->g = (Graph*)g;
  return e;
}
static bool ancestor(Node* n, const std::set<Node*>& from) {
  std::vector<Node*> w(from.begin(), from.end());
  std::unordered_set<Node*> seen;
  while (w.size()) {
    Node* x = w.back();
    w.pop_back();
    if (x == n) return true;
    if (seen.insert(x).second) w.insert(w.end(), x->up.begin(), x->up.end());
  }
  return false;
}
EXPORT cudaError_t pretend_cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  Lock lock(mutex());
  auto st = stream_of(s);
  if (!st) FAIL(cudaErrorInvalidResourceHandle);
  auto c = st->cap;
  if (g) *g = 0;
  if (!c) FAIL(cudaErrorIllegalState);
  if (c->origin != st) return invalidate(c, cudaErrorStreamCaptureUnmatched, __func__);
  if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self()))
    return invalidate(c, cudaErrorStreamCaptureWrongThread, __func__);
  cudaError_t e = cudaSuccess;
  if (c->status == cudaStreamCaptureStatusInvalidated)
    e = cudaErrorStreamCaptureInvalidated;
  else
    for (auto m : c->members)
      if (m != st)
        for (auto t : m->tips)
          if (!ancestor(t, st->tips)) {
            report("capture: a forked stream (id %lu) was not joined", m->id);
            e = cudaErrorStreamCaptureUnjoined;
          }
  for (auto m : c->members) {
    if (streams().count(m)) {
      m->cap = 0;
      m->tips.clear();
    }
  }
  captures().erase(c);
  if (e) FAIL(e);
  if (g) *g = (cudaGraph_t)c->g;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* o) {
  Lock lock(mutex());
  auto st = stream_of(s);
  if (!st) FAIL(cudaErrorInvalidResourceHandle);
  if ((uintptr_t)s <= 1 && !st->cap)
    for (auto c : captures())
      if (!(c->origin->flags & cudaStreamNonBlocking)) FAIL(cudaErrorStreamCaptureImplicit);
  *o = st->cap ? (cudaStreamCaptureStatus)st->cap->status : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* o, unsigned long long* id,
                                                    cudaGraph_t* g, const cudaGraphNode_t** deps,
                                                    const cudaGraphEdgeData** ed, size_t* n) {
  Lock lock(mutex());
  cudaError_t e = pretend_cudaStreamIsCapturing(s, o);
  if (e) return e;
  auto st = stream_of(s);
  if (id) *id = st->cap ? st->cap->id : 0;
  if (g) *g = st->cap ? (cudaGraph_t)st->cap->g : 0;
  st->deps.clear();
  if (st->cap)
    for (auto t : st->tips) st->deps.push_back((cudaGraphNode_t)t);
  if (deps) *deps = st->deps.data();
  if (ed) *ed = 0;
  if (n) *n = st->deps.size();
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t* d, const void*,
                                                               size_t n, unsigned f) {
  Lock lock(mutex());
  auto st = stream_of(s);
  if (!st || !st->cap) FAIL(cudaErrorIllegalState);
  if (f & cudaStreamSetCaptureDependencies) st->tips.clear();
  for (size_t i = 0; i < n; i++) st->tips.insert((Node*)d[i]);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  int o = capture_mode;
  capture_mode = *m;
  *m = (cudaStreamCaptureMode)o;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphCreate(cudaGraph_t* g, unsigned) {
  *g = (cudaGraph_t) new Graph;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphDestroy(cudaGraph_t g) {
  (void)g;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* out, size_t* n) {
  auto x = (Graph*)g;
  if (out)
    for (size_t i = 0; i < *n && i < x->nodes.size(); i++) out[i] = (cudaGraphNode_t)x->nodes[i];
  *n = out ? std::min(*n, x->nodes.size()) : x->nodes.size();
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphGetRootNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphNodeGetType(cudaGraphNode_t n, cudaGraphNodeType* t) {
  *t = (cudaGraphNodeType)((Node*)n)->type;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphNodeGetDependencies(cudaGraphNode_t n, cudaGraphNode_t* d, cudaGraphEdgeData*,
                                                        size_t* k) {
  auto x = (Node*)n;
  if (d)
    for (size_t i = 0; i < *k && i < x->up.size(); i++) d[i] = (cudaGraphNode_t)x->up[i];
  *k = x->up.size();
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphAddNode(cudaGraphNode_t* o, cudaGraph_t g, const cudaGraphNode_t* d, const void*,
                                            size_t n, void*) {
  auto x = new Node;
  x->type = 0;
  for (size_t i = 0; i < n; i++) x->up.push_back((Node*)d[i]);
  ((Graph*)g)->nodes.push_back(x);
  *o = (cudaGraphNode_t)x;
  return cudaSuccess;
}
static cudaError_t instantiate(cudaGraphExec_t* x, cudaGraph_t g) {
  if (!g) FAIL(cudaErrorInvalidValue);
  *x = (cudaGraphExec_t) new Graph*((Graph*)g);
  if (setting("PRETEND_GPU_TRACE", 0)) report("graph instantiated: %zu nodes", ((Graph*)g)->nodes.size());
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphInstantiate(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) {
  return instantiate(x, g);
}
EXPORT cudaError_t pretend_cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) {
  return instantiate(x, g);
}
EXPORT cudaError_t pretend_cudaGraphExecDestroy(cudaGraphExec_t x) {
  delete (Graph**)x;
  return cudaSuccess;
}
std::atomic<long> graph_launches{0}, launches{0};
EXPORT cudaError_t pretend_cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
  if (!x) FAIL(cudaErrorInvalidValue);
  graph_launches++;
  if (cudaError_t e = stream_op(s, 10, __func__)) return e;
  Graph* g = *(Graph**)x;
  bool was = replaying;
  replaying = true;
  for (auto n : g->nodes)
    for (auto& f : n->replay) f();
  replaying = was;
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaGraphUpload(cudaGraphExec_t x, cudaStream_t s) {
  if (!x) FAIL(cudaErrorInvalidValue);
  return stream_of(s) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
EXPORT cudaError_t pretend_cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* a) {
  bool cap;
  {
    Lock lock(mutex());
    auto st = stream_of(s);
    cap = st && st->cap;
  }
  if (cudaError_t e = stream_op(s, 3, __func__)) return e;
  if (!cap) f(a);
  return cudaSuccess;
}
EXPORT cudaError_t pretend_cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* a, unsigned) {
  if (cudaError_t e = stream_op(s, 3, __func__)) return e;
  f(s, cudaSuccess, a);
  return cudaSuccess;
}
