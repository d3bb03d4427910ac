// SPDX-License-Identifier: Apache-2.0
// Settings, lines on stderr, and errors.
#include "pretend.h"

thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

// Not kept: a process that others are forked from may have asked already.
int machine_device_count() { return setting("PRETEND_GPU_COUNT", 1); }

// CUDA's own reading: the devices before the first that doesn't exist.
int device_count() {
  int present = machine_device_count(), count = 0;
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return present;
  for (char* end; *visible; visible = end + (*end == ',')) {
    long device = strtol(visible, &end, 10);
    if (end == visible || device < 0 || device >= present) break;
    ++count;
  }
  return count;
}

size_t memory_limit() {
  static size_t bytes = (size_t)setting("PRETEND_GPU_MEM_MIB", 81079) << 20;
  return bytes;
}

int compute_capability_major() { return setting("PRETEND_GPU_CC", 90) / 10; }
const char* device_name() { return compute_capability_major() < 10 ? "NVIDIA H100 80GB HBM3 (pretend)" : "NVIDIA B200 (pretend)"; }

int compute_capability_minor() { return setting("PRETEND_GPU_CC", 90) % 10; }

// One write, so that lines of several processes don't mix.
void report(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  int length = snprintf(line, sizeof line, "[pretend_gpu %d] ", getpid());
  length += vsnprintf(line + length, sizeof line - length - 2, format, arguments);
  va_end(arguments);
  length = std::min(length, (int)sizeof line - 2);
  line[length] = '\n';
  if (write(2, line, length + 1) < 0) return;
}

bool reports_errors() {
  static bool on = setting("PRETEND_GPU_LOUD", 1);
  return on;
}

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

const char* error_name(int e) {
  switch (e) {
    case 0: return "cudaSuccess";
    case 1: return "cudaErrorInvalidValue";
    case 2: return "cudaErrorMemoryAllocation";
    case 9: return "cudaErrorInvalidConfiguration";
    case 13: return "cudaErrorInvalidSymbol";
    case 52: return "cudaErrorMissingConfiguration";
    case 100: return "cudaErrorNoDevice";
    case 101: return "cudaErrorInvalidDevice";
    case 201: return "cudaErrorDeviceUninitialized";
    case 400: return "cudaErrorInvalidResourceHandle";
    case 401: return "cudaErrorIllegalState";
    case 600: return "cudaErrorNotReady";
    case 704: return "cudaErrorPeerAccessAlreadyEnabled";
    case 712: return "cudaErrorHostMemoryAlreadyRegistered";
    case 713: return "cudaErrorHostMemoryNotRegistered";
    case 801: return "cudaErrorNotSupported";
    case 900: return "cudaErrorStreamCaptureUnsupported";
    case 901: return "cudaErrorStreamCaptureInvalidated";
    case 902: return "cudaErrorStreamCaptureMerge";
    case 903: return "cudaErrorStreamCaptureUnmatched";
    case 904: return "cudaErrorStreamCaptureUnjoined";
    case 905: return "cudaErrorStreamCaptureIsolation";
    case 906: return "cudaErrorStreamCaptureImplicit";
    case 907: return "cudaErrorCapturedEvent";
    case 908: return "cudaErrorStreamCaptureWrongThread";
    default: return "cudaError(other)";
  }
}

cudaError_t fail(cudaError_t error, const char* function) {
  if (error == cudaSuccess || error == cudaErrorNotReady) return error;
  last_error = error;
  if (reports_errors()) report("%s: %s", function, error_name(error));
  return error;
}

// Not destroyed at exit: other libraries' destructors still call in.
std::recursive_mutex& mutex() {
  static auto* only = new std::recursive_mutex;
  return *only;
}

// What the libraries' stubs call (build.py).
EXPORT void pretend_stub(const char* name) {
  static bool on = setting("PRETEND_GPU_TRACE_STUBS", 0);
  if (!on) return;
  Lock lock(mutex());
  static auto* seen = new std::unordered_set<std::string>;
  if (seen->insert(name).second) report("stub without behaviour: %s", name);
}

EXPORT cudaError_t pretend_cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t pretend_cudaPeekAtLastError() { return last_error; }

EXPORT const char* pretend_cudaGetErrorName(cudaError_t e) { return error_name(e); }
EXPORT const char* pretend_cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : error_name(e);
}
