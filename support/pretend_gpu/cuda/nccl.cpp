// SPDX-License-Identifier: Apache-2.0
// NCCL over shared memory: data of other processes is read by process_vm_readv; all ranks must call the same operation.
#include "pretend.h"

struct Slot {
  std::atomic<uint64_t> ph;
  int pid, op, dtype, root, redop, color, key;
  uint64_t count;
  const void* ptr;
  float scale;
  int pad;
  char name[24];
};
struct Box {
  std::atomic<int> full;
  int pid, dtype;
  uint64_t count, bytes;
  void* ptr;
};
enum { MAX_RANKS = 32, RING = 32 };
struct SharedState {
  std::atomic<int> attached;
  Slot slot[MAX_RANKS];
};
struct ncclComm {
  std::string name;
  int rank, n, dev;
  SharedState* shm;
  Box* box;
  uint64_t ph = 0;
  int splits = 0;
  std::vector<uint64_t> sent, got;
  uint64_t wr[MAX_RANKS] = {0}, rd[MAX_RANKS] = {0};
  std::vector<std::pair<Box*, void*>> live;
  std::map<int, float> scales;
  int nextop = 10;
  bool aborted = false;
  char last[256];
};

static char nccl_last[512];
static int nccl_error(int e, const char* f, ...) {
  va_list a;
  va_start(a, f);
  vsnprintf(nccl_last, sizeof nccl_last, f, a);
  va_end(a);
  report("NCCL: %s", nccl_last);
  return e;
}
static double nccl_timeout() {
  static double t = setting("PRETEND_GPU_NCCL_TIMEOUT", 300);
  return t;
}
static const char* operation_names[] = {"none",     "allreduce", "broadcast", "reduce", "allgather", "reducescatter",
                                        "alltoall", "split",     "init",      "gather", "scatter",   "barrier"};
static int wait_phase(ncclComm* c, const char* what) {
  c->ph++;
  c->shm->slot[c->rank].ph.store(c->ph);
  double t0 = now();
  int spin = 0;
  for (int r = 0; r < c->n; r++)
    while (c->shm->slot[r].ph.load() < c->ph) {
      if (c->aborted) return 3;
      if (++spin > 200)
        usleep(100);
      else
        sched_yield();
      if (now() - t0 > nccl_timeout()) {
        Slot& a = c->shm->slot[c->rank];
        Slot& b = c->shm->slot[r];
        return nccl_error(3,
                          "comm %s rank %d/%d waited %.0f s in %s (%s count %lu) for rank %d, which is at phase %lu of "
                          "%lu (last op %s count %lu)",
                          c->name.c_str(), c->rank, c->n, nccl_timeout(), what, operation_names[a.op], a.count, r,
                          b.ph.load(), c->ph, operation_names[b.op], b.count);
      }
    }
  return 0;
}
static int attach(ncclComm* c) {
  std::string f = "/dev/shm/pretend_nccl_" + c->name;
  size_t n = sizeof(SharedState) + sizeof(Box) * c->n * c->n * RING;
  if (c->n > MAX_RANKS) return nccl_error(4, "at most %d ranks", MAX_RANKS);
  int fd = open(f.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, n)) return nccl_error(2, "cannot open %s", f.c_str());
  void* p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (p == MAP_FAILED) return nccl_error(2, "cannot map %s", f.c_str());
  c->shm = (SharedState*)p;
  c->box = (Box*)((char*)p + sizeof(SharedState));
  c->shm->attached++;
  c->shm->slot[c->rank].pid = getpid();
  c->shm->slot[c->rank].op = 8;
  int e = wait_phase(c, "init");
  unlink(f.c_str());
  return e;
}
static size_t element_size(int t) {
  static size_t s[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return t >= 0 && t < 12 ? s[t] : 1;
}
static bool peer_read(int pid, void* d, const void* s, size_t n) {
  if (!n) return true;
  if (pid == getpid()) {
    memmove(d, s, n);
    return true;
  }
  size_t o = 0;
  while (o < n) {
    iovec l{(char*)d + o, n - o}, r{(char*)s + o, n - o};
    ssize_t k = process_vm_readv(pid, &l, 1, &r, 1, 0);
    if (k <= 0) {
      nccl_error(2, "process_vm_readv(%d, %p, %zu): %s", pid, s, n - o, strerror(errno));
      return false;
    }
    o += k;
  }
  return true;
}
static double get(const void* p, size_t i, int t) {
  switch (t) {
    case 0: return ((int8_t*)p)[i];
    case 1: return ((uint8_t*)p)[i];
    case 2: return ((int32_t*)p)[i];
    case 3: return ((uint32_t*)p)[i];
    case 6: return half_to_float(((uint16_t*)p)[i]);
    case 7: return ((float*)p)[i];
    case 8: return ((double*)p)[i];
    case 9: return bfloat16_to_float(((uint16_t*)p)[i]);
    case 10: return e4m3_to_float(((uint8_t*)p)[i]);
    case 11: return e5m2_to_float(((uint8_t*)p)[i]);
  }
  return 0;
}
static void put(void* p, size_t i, int t, double v) {
  switch (t) {
    case 0: ((int8_t*)p)[i] = v; break;
    case 1: ((uint8_t*)p)[i] = v; break;
    case 2: ((int32_t*)p)[i] = v; break;
    case 3: ((uint32_t*)p)[i] = v; break;
    case 6: ((uint16_t*)p)[i] = float_to_half(v); break;
    case 7: ((float*)p)[i] = v; break;
    case 8: ((double*)p)[i] = v; break;
    case 9: ((uint16_t*)p)[i] = float_to_bfloat16(v); break;
  }
}
template <class T>
static T reduce(T a, T b, int op) {
  switch (op) {
    case 1: return a * b;
    case 2: return a > b || a != a ? a : b;
    case 3: return a < b || a != a ? a : b;
    default: return a + b;
  }
}
// out[i] = reduction over ranks of their ptr[off + i]
static int reduce_into(ncclComm* c, std::vector<char>& out, uint64_t off, uint64_t cnt, int t, int op) {
  size_t z = element_size(t);
  out.resize(cnt * z);
  std::vector<char> tmp(cnt * z);
  bool i64 = t == 4 || t == 5;
  std::vector<double> acc(i64 ? 0 : cnt);
  std::vector<int64_t> ai(i64 ? cnt : 0);
  for (int r = 0; r < c->n; r++) {
    Slot& s = c->shm->slot[r];
    if (!peer_read(s.pid, tmp.data(), (const char*)s.ptr + off * z, cnt * z)) return 2;
    int o = op >= 5 ? 0 : op;
    if (i64) {
      for (uint64_t i = 0; i < cnt; i++) {
        int64_t v = ((int64_t*)tmp.data())[i];
        ai[i] = r ? reduce<int64_t>(ai[i], v, o) : v;
      }
    } else
      for (uint64_t i = 0; i < cnt; i++) {
        double v = get(tmp.data(), i, t);
        if (op >= 5) v *= s.scale;
        acc[i] = r ? reduce<double>(acc[i], v, o) : v;
      }
  }
  for (uint64_t i = 0; i < cnt; i++) {
    if (i64)
      ((int64_t*)out.data())[i] = op == 4 ? ai[i] / c->n : ai[i];
    else
      put(out.data(), i, t, op == 4 ? acc[i] / c->n : acc[i]);
  }
  return 0;
}
static thread_local int group_depth = 0;
struct Transfer {
  bool send;
  void* buf;
  size_t count;
  int t, peer;
  ncclComm* c;
  Node* node;  // captured: it moves at each launch of the graph
};
static thread_local std::vector<Transfer>* pending = 0;
static int nccl_trace() {
  static int v = setting("PRETEND_GPU_NCCL_TRACE", 0);
  return v;
}
static int collective(ncclComm* c, int op, const void* sb, void* rb, uint64_t count, int t, int root, int redop,
                      cudaStream_t st) {
  if (!c || c->aborted) return nccl_error(4, "%s on a null or aborted communicator", operation_names[op]);
  if (stream_op(st, 0, operation_names[op])) return 1;
  (void)0;
  if (captured_node && !replaying) {
    on_replay([=] { collective(c, op, sb, rb, count, t, root, redop, st); });
    return 0;
  }
  {
    Lock lock(mutex());
    if (count && sb) {
      Block* b = find(sb);
      if (!b) return nccl_error(4, "%s: send buffer %p is not known memory", operation_names[op], sb);
    }
    if (count && rb && (op != 3 || c->rank == root)) {
      Block* b = find(rb);
      if (!b) return nccl_error(4, "%s: receive buffer %p is not known memory", operation_names[op], rb);
    }
  }
  if (nccl_trace())
    report("nccl %s comm %s rank %d/%d count %lu dtype %d root %d op %d", operation_names[op],
           c->name.substr(0, 8).c_str(), c->rank, c->n, count, t, root, redop);
  Slot& me = c->shm->slot[c->rank];
  me.op = op;
  me.dtype = t;
  me.root = root;
  me.redop = redop;
  me.count = count;
  me.ptr = sb;
  me.scale = redop >= 5 && c->scales.count(redop) ? c->scales[redop] : 1.f;
  me.pid = getpid();
  if (int e = wait_phase(c, "start")) return e;
  int bad = 0;
  for (int r = 0; r < c->n; r++) {
    Slot& s = c->shm->slot[r];
    if (s.op != op || s.count != count || s.dtype != t || s.root != root || (s.redop != redop && redop < 5)) {
      bad = nccl_error(5,
                       "MISMATCH on comm %s: rank %d calls %s count %lu dtype %d root %d op %d, rank %d calls %s count "
                       "%lu dtype %d root %d op %d",
                       c->name.c_str(), c->rank, operation_names[op], count, t, root, redop, r, operation_names[s.op],
                       s.count, s.dtype, s.root, s.redop);
      break;
    }
  }
  std::vector<char> out;
  size_t z = element_size(t);
  int e = bad;
  if (!e) switch (op) {
      case 1: e = reduce_into(c, out, 0, count, t, redop); break;
      case 3:
        if (c->rank == root) e = reduce_into(c, out, 0, count, t, redop);
        break;
      case 5: e = reduce_into(c, out, (uint64_t)c->rank * count, count, t, redop); break;
      case 2:
        out.resize(count * z);
        if (!peer_read(c->shm->slot[root].pid, out.data(), c->shm->slot[root].ptr, count * z)) e = 2;
        break;
      case 4:
      case 9:
        if (op == 9 && c->rank != root) break;
        out.resize(count * z * c->n);
        for (int r = 0; r < c->n && !e; r++)
          if (!peer_read(c->shm->slot[r].pid, out.data() + r * count * z, c->shm->slot[r].ptr, count * z)) e = 2;
        break;
      case 6:
        out.resize(count * z * c->n);
        for (int r = 0; r < c->n && !e; r++)
          if (!peer_read(c->shm->slot[r].pid, out.data() + r * count * z,
                         (const char*)c->shm->slot[r].ptr + c->rank * count * z, count * z))
            e = 2;
        break;
      case 10:
        out.resize(count * z);
        if (!peer_read(c->shm->slot[root].pid, out.data(), (const char*)c->shm->slot[root].ptr + c->rank * count * z,
                       count * z))
          e = 2;
        break;
    }
  if (int e2 = wait_phase(c, "end")) return e2;
  if (!e && out.size() && rb) memcpy(rb, out.data(), out.size());
  return e;
}
static int send(Transfer& p) {
  ncclComm* c = p.c;
  size_t n = p.count * element_size(p.t);
  Box* b = c->box + (((size_t)c->rank * c->n + p.peer) * RING + c->wr[p.peer]++ % RING);
  double t0 = now();
  while (b->full.load()) {
    usleep(100);
    if (now() - t0 > nccl_timeout())
      return nccl_error(3, "send from %d to %d: mailbox full for %.0f s (comm %s)", c->rank, p.peer, nccl_timeout(),
                        c->name.c_str());
  }
  for (size_t i = 0; i < c->live.size();) {
    if (!c->live[i].first->full.load() || c->live[i].first == b) {
      free(c->live[i].second);
      c->live[i] = c->live.back();
      c->live.pop_back();
    } else
      i++;
  }
  void* q = malloc(n ? n : 1);
  memcpy(q, p.buf, n);
  b->ptr = q;
  b->pid = getpid();
  b->count = p.count;
  b->dtype = p.t;
  b->bytes = n;
  c->live.push_back({b, q});
  b->full.store(1);
  return 0;
}
static int receive(Transfer& p) {
  ncclComm* c = p.c;
  size_t n = p.count * element_size(p.t);
  Box* b = c->box + (((size_t)p.peer * c->n + c->rank) * RING + c->rd[p.peer]++ % RING);
  double t0 = now();
  int spin = 0;
  while (!b->full.load()) {
    if (++spin > 200)
      usleep(100);
    else
      sched_yield();
    if (c->aborted) return 3;
    if (now() - t0 > nccl_timeout())
      return nccl_error(3, "recv on %d from %d: nothing came for %.0f s (comm %s, count %zu)", c->rank, p.peer,
                        nccl_timeout(), c->name.c_str(), p.count);
  }
  int e = 0;
  if (b->bytes != n)
    e = nccl_error(5, "MISMATCH: rank %d receives %zu elements of dtype %d from %d, which sent %lu of dtype %d",
                   c->rank, p.count, p.t, p.peer, b->count, b->dtype);
  else if (!peer_read(b->pid, p.buf, b->ptr, n))
    e = 2;
  b->full.store(0);
  return e;
}
static int move_all(std::vector<Transfer> v) {
  int e = 0;
  for (auto& p : v)
    if (p.send)
      if (int r = send(p)) e = r;
  for (auto& p : v)
    if (!p.send)
      if (int r = receive(p)) e = r;
  return e;
}
static int flush() {
  if (!pending) return 0;
  std::vector<Transfer> captured, now;
  for (auto& p : *pending) (p.node ? captured : now).push_back(p);
  pending->clear();
  if (!captured.empty()) captured.back().node->replay.push_back([captured] { move_all(captured); });
  return move_all(now);
}
static int transfer(bool send, void* b, size_t n, int t, int peer, ncclComm* c, cudaStream_t st) {
  if (!c) return 4;
  if (stream_op(st, 0, "p2p")) return 1;
  if (peer < 0 || peer >= c->n) return nccl_error(4, "peer %d of %d", peer, c->n);
  if (n) {
    Lock lock(mutex());
    if (!find(b)) return nccl_error(4, "send/recv buffer %p is not known memory", b);
  }
  if (nccl_trace())
    report("nccl %s comm %s rank %d peer %d count %zu dtype %d", send ? "send" : "recv", c->name.substr(0, 8).c_str(),
           c->rank, peer, n, t);
  if (!pending) pending = new std::vector<Transfer>;
  pending->push_back(Transfer{send, b, n, t, peer, c, replaying ? 0 : captured_node});
  return group_depth ? 0 : flush();
}
struct UniqueId {
  char b[128];
};
static std::string hex(const char* p, int n) {
  std::string s;
  char b[3];
  for (int i = 0; i < n; i++) {
    snprintf(b, 3, "%02x", (unsigned char)p[i]);
    s += b;
  }
  return s;
}
EXPORT int pretend_ncclGetUniqueId(UniqueId* u) {
  int fd = open("/dev/urandom", O_RDONLY);
  int k = read(fd, u->b, 128);
  (void)k;
  close(fd);
  return 0;
}
static int create_communicator(ncclComm** o, int n, const std::string& nm, int r) {
  auto c = new ncclComm;
  c->name = nm;
  c->rank = r;
  c->n = n;
  c->dev = current_device;
  int e = attach(c);
  if (!e && nccl_trace()) report("nccl init comm %s rank %d/%d", nm.substr(0, 8).c_str(), r, n);
  *o = c;
  return e;
}
EXPORT int pretend_ncclCommInitRank(ncclComm** o, int n, UniqueId u, int r) {
  return create_communicator(o, n, hex(u.b, 12), r);
}
EXPORT int pretend_ncclCommInitRankConfig(ncclComm** o, int n, UniqueId u, int r, void*) {
  return create_communicator(o, n, hex(u.b, 12), r);
}
EXPORT int pretend_ncclCommInitRankScalable(ncclComm** o, int n, int r, int, UniqueId* u, void*) {
  return create_communicator(o, n, hex(u->b, 12), r);
}
EXPORT int pretend_ncclCommInitAll(ncclComm** o, int n, const int*) {
  if (n != 1) return nccl_error(5, "ncclCommInitAll with %d devices is not provided", n);
  UniqueId u;
  pretend_ncclGetUniqueId(&u);
  return create_communicator(o, 1, hex(u.b, 12), 0);
}
EXPORT int pretend_ncclCommSplit(ncclComm* c, int color, int key, ncclComm** o, void*) {
  Slot& me = c->shm->slot[c->rank];
  me.op = 7;
  me.color = color;
  me.key = key;
  me.count = 0;
  *o = 0;
  int k = c->splits++;
  if (int e = wait_phase(c, "split")) return e;
  std::vector<std::pair<int, int>> v;
  for (int r = 0; r < c->n; r++) {
    if (c->shm->slot[r].op != 7)
      return nccl_error(5, "MISMATCH: rank %d splits, rank %d calls %s", c->rank, r,
                        operation_names[c->shm->slot[r].op]);
    if (c->shm->slot[r].color == color) v.push_back({c->shm->slot[r].key, r});
  }
  if (int e = wait_phase(c, "split2")) return e;
  if (color < 0) return 0;
  std::sort(v.begin(), v.end());
  int nr = 0;
  while (v[nr].second != c->rank) nr++;
  return create_communicator(o, v.size(), c->name + "_" + std::to_string(k) + "_" + std::to_string(color), nr);
}
EXPORT int pretend_ncclCommDestroy(ncclComm*) { return 0; }
EXPORT int pretend_ncclCommFinalize(ncclComm*) { return 0; }
EXPORT int pretend_ncclCommAbort(ncclComm* c) {
  if (c) c->aborted = true;
  return 0;
}
EXPORT int pretend_ncclCommGetAsyncError(ncclComm*, int* e) {
  *e = 0;
  return 0;
}
EXPORT int pretend_ncclCommCount(ncclComm* c, int* n) {
  *n = c->n;
  return 0;
}
EXPORT int pretend_ncclCommUserRank(ncclComm* c, int* n) {
  *n = c->rank;
  return 0;
}
EXPORT int pretend_ncclCommCuDevice(ncclComm* c, int* n) {
  *n = c->dev;
  return 0;
}
EXPORT int pretend_ncclGetVersion(int* v) {
  *v = setting("PRETEND_GPU_NCCL", 22809);
  return 0;
}
EXPORT const char* pretend_ncclGetErrorString(int e) {
  static const char* s[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                            "invalid argument", "invalid usage",        "remote process error",   "in progress"};
  return e >= 0 && e < 8 ? s[e] : "unknown";
}
EXPORT const char* pretend_ncclGetLastError(ncclComm*) { return nccl_last; }
EXPORT int pretend_ncclMemAlloc(void** p, size_t n) { return allocate(p, n) ? 1 : 0; }
EXPORT int pretend_ncclMemFree(void* p) { return free_any(p) ? 1 : 0; }
EXPORT int pretend_ncclCommRegister(ncclComm*, void* b, size_t, void** h) {
  *h = b;
  return 0;
}
EXPORT int pretend_ncclCommWindowRegister(ncclComm*, void* b, size_t, void** w, int) {
  *w = b;
  return 0;
}
EXPORT int pretend_ncclRedOpCreatePreMulSum(int* op, void* s, int t, int, ncclComm* c) {
  *op = c->nextop++;
  c->scales[*op] = get(s, 0, t);
  return 0;
}
EXPORT int pretend_ncclRedOpDestroy(int, ncclComm*) { return 0; }
EXPORT int pretend_ncclGroupStart() {
  group_depth++;
  return 0;
}
EXPORT int pretend_ncclGroupEnd() {
  if (--group_depth == 0) return flush();
  return 0;
}
EXPORT int pretend_ncclAllReduce(const void* s, void* r, size_t n, int t, int op, ncclComm* c, cudaStream_t st) {
  return collective(c, 1, s, r, n, t, 0, op, st);
}
EXPORT int pretend_ncclBroadcast(const void* s, void* r, size_t n, int t, int root, ncclComm* c, cudaStream_t st) {
  return collective(c, 2, s ? s : r, r, n, t, root, 0, st);
}
EXPORT int pretend_ncclBcast(void* b, size_t n, int t, int root, ncclComm* c, cudaStream_t st) {
  return collective(c, 2, b, b, n, t, root, 0, st);
}
EXPORT int pretend_ncclReduce(const void* s, void* r, size_t n, int t, int op, int root, ncclComm* c, cudaStream_t st) {
  return collective(c, 3, s, r, n, t, root, op, st);
}
EXPORT int pretend_ncclAllGather(const void* s, void* r, size_t n, int t, ncclComm* c, cudaStream_t st) {
  return collective(c, 4, s, r, n, t, 0, 0, st);
}
EXPORT int pretend_ncclReduceScatter(const void* s, void* r, size_t n, int t, int op, ncclComm* c, cudaStream_t st) {
  return collective(c, 5, s, r, n, t, 0, op, st);
}
EXPORT int pretend_ncclAlltoAll(const void* s, void* r, size_t n, int t, ncclComm* c, cudaStream_t st) {
  return collective(c, 6, s, r, n, t, 0, 0, st);
}
EXPORT int pretend_ncclGather(const void* s, void* r, size_t n, int t, int root, ncclComm* c, cudaStream_t st) {
  return collective(c, 9, s, r, n, t, root, 0, st);
}
EXPORT int pretend_ncclScatter(const void* s, void* r, size_t n, int t, int root, ncclComm* c, cudaStream_t st) {
  return collective(c, 10, s, r, n, t, root, 0, st);
}
EXPORT int pretend_ncclSend(const void* b, size_t n, int t, int peer, ncclComm* c, cudaStream_t st) {
  return transfer(true, (void*)b, n, t, peer, c, st);
}
EXPORT int pretend_ncclRecv(void* b, size_t n, int t, int peer, ncclComm* c, cudaStream_t st) {
  return transfer(false, b, n, t, peer, c, st);
}
