// A link between host and GPU of a limited rate, for whatever program it is loaded into (LD_PRELOAD): every
// copy by cudaMemcpyAsync, cudaMemcpy or cudaMemcpy2DAsync between the two takes at least bytes / rate, and
// copies of one direction take that time one after the other, in the order in which they begin. Both
// directions have the whole rate.
//
// The stream of a copy writes "begun" to host memory before it and waits for "over" behind it. A thread a
// direction reads the one, and writes the other when the link would have carried the bytes. A copy itself
// runs at the real rate meanwhile, so the buffers are used as in a program that waits for a slow link.
//
// SLOW_LINK_GB_S: the rate, 1e9 bytes a second each way. SLOW_LINK_REPORT: a file that gets bytes and copies
// at the end.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

enum { kToGpu = 1, kToHost = 2, kByAddress = 4 };  // of enum cudaMemcpyKind
enum {
  kPending = 4096,
  kFree = 1 << 16
};                                    // copies under way at once; bytes below which a copy costs nothing
static double const kJitterS = 1e-4;  // a copy that begins this soon after another follows it without a gap

typedef int (*Memcpy)(void*, void const*, size_t, int);
typedef int (*MemcpyAsync)(void*, void const*, size_t, int, void*);
typedef int (*Memcpy2DAsync)(void*, size_t, void const*, size_t, size_t, size_t, int, void*);
typedef int (*HostAlloc)(void**, size_t, unsigned);
typedef int (*StreamSync)(void*);
typedef int (*StreamValue)(void*, uint64_t, uint32_t, unsigned);
typedef int (*PointerAttribute)(void*, int, uint64_t);

static struct {
  Memcpy copy;
  MemcpyAsync copy_async;
  Memcpy2DAsync copy_2d;
  HostAlloc host_alloc;
  StreamSync sync;
  StreamValue write, wait;
  PointerAttribute attribute;
} real;

// One direction. `entry[i]` is written by the copying thread before `tail` passes it, then belongs to the
// link's thread until `over[i]` has the number of its turn. A place is used again only when that has
// happened.
typedef struct {
  pthread_mutex_t order;
  _Atomic uint64_t tail;
  _Atomic uint64_t head;
  size_t bytes[kPending];
  uint32_t volatile* begun;
  uint32_t volatile* over;
  uint64_t total_bytes, copies;
} Link;

static Link links[2] = {{.order = PTHREAD_MUTEX_INITIALIZER}, {.order = PTHREAD_MUTEX_INITIALIZER}};
static double bytes_per_s;
static pthread_once_t started = PTHREAD_ONCE_INIT;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fail(char const* what) {
  fprintf(stderr, "slow_link: %s\n", what);
  abort();
}

static int runtime_of(struct dl_phdr_info* info, size_t size, void* found) {
  (void)size;
  if (info->dlpi_name && strstr(info->dlpi_name, "libcudart.so")) *(char const**)found = info->dlpi_name;
  return 0;
}

// Copies of one direction begin in any order of their streams: the first pending one that has begun goes
// next.
static void* carry(void* argument) {
  Link* const link = argument;
  prctl(PR_SET_TIMERSLACK, 1000UL);
  struct timespec const pause = {0, 5000};
  double free_at = 0;
  static _Thread_local unsigned char done[kPending];
  for (;;) {
    uint64_t const tail = atomic_load(&link->tail);
    uint64_t head = atomic_load(&link->head), next = tail;
    for (uint64_t i = head; i < tail; ++i)
      if (!done[i % kPending] && link->begun[i % kPending] == (uint32_t)i + 1) {
        next = i;
        break;
      }
    if (next == tail) {
      nanosleep(&pause, NULL);
      continue;
    }
    double const begin = now();
    double const from = begin - free_at < kJitterS ? free_at : begin;
    free_at = from + (double)link->bytes[next % kPending] / bytes_per_s;
    while (now() < free_at) nanosleep(&pause, NULL);
    link->over[next % kPending] = (uint32_t)next + 1;
    done[next % kPending] = 1;
    while (head < tail && done[head % kPending]) done[head++ % kPending] = 0;
    atomic_store(&link->head, head);
  }
  return NULL;
}

static void report(void) {
  char const* const path = getenv("SLOW_LINK_REPORT");
  FILE* const file = path ? fopen(path, "w") : NULL;
  if (!file) return;
  fprintf(
      file,
      "{\"to_gpu\": {\"bytes\": %llu, \"copies\": %llu}, \"to_host\": {\"bytes\": %llu, \"copies\": %llu}}\n",
      (unsigned long long)links[0].total_bytes, (unsigned long long)links[0].copies,
      (unsigned long long)links[1].total_bytes, (unsigned long long)links[1].copies);
  fclose(file);
}

static void start(void) {
  char const *path = NULL, *const rate = getenv("SLOW_LINK_GB_S");
  bytes_per_s = rate ? 1e9 * atof(rate) : 0;
  if (bytes_per_s <= 0) fail("SLOW_LINK_GB_S is no rate above 0");
  dl_iterate_phdr(runtime_of, &path);
  void* const runtime = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!runtime || !driver) fail("no CUDA runtime or driver in this process");
  real.copy = (Memcpy)dlsym(runtime, "cudaMemcpy");
  real.copy_async = (MemcpyAsync)dlsym(runtime, "cudaMemcpyAsync");
  real.copy_2d = (Memcpy2DAsync)dlsym(runtime, "cudaMemcpy2DAsync");
  real.host_alloc = (HostAlloc)dlsym(runtime, "cudaHostAlloc");
  real.sync = (StreamSync)dlsym(runtime, "cudaStreamSynchronize");
  real.write = (StreamValue)dlsym(driver, "cuStreamWriteValue32_v2");
  real.wait = (StreamValue)dlsym(driver, "cuStreamWaitValue32_v2");
  real.attribute = (PointerAttribute)dlsym(driver, "cuPointerGetAttribute");
  if (!real.copy || !real.copy_async || !real.copy_2d || !real.host_alloc || !real.write || !real.wait ||
      !real.attribute)
    fail("the CUDA runtime or driver lacks a function");
  for (int i = 0; i < 2; ++i) {
    void* flags = NULL;
    if (real.host_alloc(&flags, 2 * kPending * sizeof(uint32_t), 1 | 2))
      fail("no page-locked memory");  // portable, mapped
    memset(flags, 0, 2 * kPending * sizeof(uint32_t));
    links[i].begun = flags;
    links[i].over = links[i].begun + kPending;
    pthread_t thread;
    if (pthread_create(&thread, NULL, carry, &links[i])) fail("no thread");
    pthread_detach(thread);
  }
  atexit(report);
}

static int is_on_gpu(void const* address) {
  unsigned type =
      0;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 1 host, 2 device; an error for memory CUDA does not know
  return real.attribute(&type, 2, (uint64_t)(uintptr_t)address) == 0 && type == 2;
}

static Link* link_of(void* to, void const* from, size_t bytes, int kind) {
  if (bytes < kFree) return NULL;
  if (kind == kByAddress) {
    int const target = is_on_gpu(to), source = is_on_gpu(from);
    kind = target == source ? 0 : target ? kToGpu : kToHost;
  }
  return kind == kToGpu ? &links[0] : kind == kToHost ? &links[1] : NULL;
}

// -> the place of the copy. The caller enqueues it, then `end`, and holds `order` meanwhile, so that two
// threads that share a stream cannot come between.
static uint64_t begin(Link* link, size_t bytes, void* stream) {
  pthread_mutex_lock(&link->order);
  uint64_t const place = atomic_load(&link->tail);
  if (place - atomic_load(&link->head) >= kPending) fail("too many copies under way");
  link->bytes[place % kPending] = bytes;
  link->total_bytes += bytes;
  link->copies += 1;
  if (real.write(stream, (uint64_t)(uintptr_t)&link->begun[place % kPending], (uint32_t)place + 1, 0))
    fail("a stream cannot write a value");
  atomic_store(&link->tail, place + 1);
  return place;
}

static void end(Link* link, uint64_t place, void* stream) {
  // 1: until the value is equal.
  if (real.wait(stream, (uint64_t)(uintptr_t)&link->over[place % kPending], (uint32_t)place + 1, 1))
    fail("a stream cannot wait for a value");
  pthread_mutex_unlock(&link->order);
}

int cudaMemcpyAsync(void* to, void const* from, size_t bytes, int kind, void* stream) {
  pthread_once(&started, start);
  Link* const link = link_of(to, from, bytes, kind);
  if (!link) return real.copy_async(to, from, bytes, kind, stream);
  uint64_t const place = begin(link, bytes, stream);
  int const error = real.copy_async(to, from, bytes, kind, stream);
  end(link, place, stream);
  return error;
}

int cudaMemcpy2DAsync(void* to, size_t to_pitch, void const* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  pthread_once(&started, start);
  Link* const link = link_of(to, from, width * height, kind);
  if (!link) return real.copy_2d(to, to_pitch, from, from_pitch, width, height, kind, stream);
  uint64_t const place = begin(link, width * height, stream);
  int const error = real.copy_2d(to, to_pitch, from, from_pitch, width, height, kind, stream);
  end(link, place, stream);
  return error;
}

int cudaMemcpy(void* to, void const* from, size_t bytes, int kind) {
  pthread_once(&started, start);
  Link* const link = link_of(to, from, bytes, kind);
  if (!link) return real.copy(to, from, bytes, kind);
  uint64_t const place = begin(link, bytes, NULL);
  int const error = real.copy_async(to, from, bytes, kind, NULL);
  end(link, place, NULL);
  int const waited = real.sync(NULL);
  return error ? error : waited;
}
