/* Faults on demand for test_io_faults.py, which compiles this and preloads it (LD_PRELOAD).
 *
 * Every I/O of at least 4096 bytes is counted; each `every`-th is either cut to `keep` bytes before the
 * kernel sees it and reported as `extra` bytes longer than that (bytes that never moved: an O_DIRECT caller
 * must not count part of a block), or done and reported as failed with `error`. For the asynchronous
 * interfaces `keep` also marks the requests that were cut, so no request of the test may have that length.
 *
 * Apart from that, pread and pwrite can be made slow.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { IO_URING_SETUP = 425, IO_URING_ENTER = 426 };

static int every, error;
static long keep = -1, extra;
static long counter;
static int refused; /* bits: 1 O_DIRECT, 2 fallocate, 4 fdatasync, 8 io_uring_setup, 16 io_setup */

void fault_set(int every_, long keep_, long extra_, int error_) {
  every = every_, keep = keep_, extra = extra_, error = error_;
}
void fault_refuse(int bits) { refused = bits; }

static long slow_ns, slow_requests;

void fault_slow(long nanoseconds, long requests) { slow_ns = nanoseconds, slow_requests = requests; }

static void take_time(void) {
  if (slow_requests <= 0 || __atomic_fetch_sub(&slow_requests, 1, __ATOMIC_RELAXED) <= 0) return;
  struct timespec const time = {slow_ns / 1000000000, slow_ns % 1000000000};
  nanosleep(&time, NULL);
}

static int due(void) { return every > 0 && __atomic_add_fetch(&counter, 1, __ATOMIC_RELAXED) % every == 0; }

typedef ssize_t (*transfer_t)(int, void*, size_t, off_t);
static ssize_t transfer(char const* name, int fd, void* data, size_t nbytes, off_t offset) {
  transfer_t const real = (transfer_t)dlsym(RTLD_NEXT, name);
  if (nbytes >= 4096) take_time();
  if (nbytes < 4096 || !due()) return real(fd, data, nbytes, offset);
  if (error != 0) {
    errno = error;
    return -1;
  }
  if (keep < 0 || nbytes <= (size_t)keep) return real(fd, data, nbytes, offset);
  ssize_t const moved = keep == 0 ? 0 : real(fd, data, keep, offset);
  return moved < 0 ? moved : moved + extra;
}
ssize_t pread(int fd, void* data, size_t n, off_t o) { return transfer("pread", fd, data, n, o); }
ssize_t pread64(int fd, void* data, size_t n, off_t o) { return transfer("pread64", fd, data, n, o); }
ssize_t pwrite(int fd, void const* data, size_t n, off_t o) {
  return transfer("pwrite", fd, (void*)data, n, o);
}
ssize_t pwrite64(int fd, void const* data, size_t n, off_t o) {
  return transfer("pwrite64", fd, (void*)data, n, o);
}

static int control(char const* name, int fd, int command, void* argument) {
  if ((refused & 1) && command == F_SETFL && ((long)argument & O_DIRECT)) {
    errno = EINVAL;
    return -1;
  }
  return ((int (*)(int, int, void*))dlsym(RTLD_NEXT, name))(fd, command, argument);
}
#define CONTROL(name)                             \
  int name(int fd, int command, ...) {            \
    va_list list;                                 \
    va_start(list, command);                      \
    void* argument = va_arg(list, void*);         \
    va_end(list);                                 \
    return control(#name, fd, command, argument); \
  }
CONTROL(fcntl)
CONTROL(fcntl64)

int fallocate(int fd, int mode, off_t offset, off_t nbytes) {
  if (refused & 2) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return ((int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate"))(fd, mode, offset, nbytes);
}

int fdatasync(int fd) {
  if (refused & 4) {
    errno = EIO;
    return -1;
  }
  return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}

/* What an asynchronous request that ended with `result` is reported as. */
static long altered(long result) {
  if (result < 4096 || every == 0) return result;
  if (error != 0) return due() ? -error : result;
  return result == keep ? result + extra : result;
}

/* The io_uring that was made last: requests are cut in the submission ring, results changed in the completion
 * ring. */
static char *ring, *entries;
static uint32_t params[30]; /* struct io_uring_params */
static int ring_fd = -1;
static uint32_t seen; /* completions looked at */
static uint32_t* ring_word(int index) { return (uint32_t*)(ring + params[index]); }

void* mmap(void* address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
  void* const result = (void*)syscall(SYS_mmap, address, nbytes, protection, flags, fd, offset);
  if (result != MAP_FAILED && fd >= 0 && fd == ring_fd) {
    if (offset == 0) ring = result;
    if (offset == 0x10000000) entries = result;
  }
  return result;
}

static void cut_submissions(uint32_t count) {
  uint32_t const tail = *ring_word(11), mask = *ring_word(12);
  for (uint32_t i = tail - count; i != tail; ++i) {
    uint8_t* const entry = (uint8_t*)entries + (i & mask) * 64;
    uint32_t* const nbytes = (uint32_t*)(entry + 24);
    uint8_t const opcode = entry[0];
    if ((opcode == 4 || opcode == 5 || opcode == 22 || opcode == 23) && *nbytes > keep && due())
      *nbytes = keep;
  }
}

static void change_completions(void) {
  uint32_t const head = *ring_word(20), tail = __atomic_load_n(ring_word(21), __ATOMIC_ACQUIRE);
  uint32_t const mask = *ring_word(22);
  if ((int32_t)(head - seen) > 0) seen = head;
  for (; seen != tail; ++seen) {
    int32_t* const result = (int32_t*)(ring + params[25] + (seen & mask) * 16 + 8);
    *result = (int32_t)altered(*result);
  }
}

long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  static long (*real)(long, ...);
  if (real == NULL) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  if ((number == IO_URING_SETUP && (refused & 8)) || (number == SYS_io_setup && (refused & 16))) {
    errno = EPERM;
    return -1;
  }
  int const cutting = every > 0 && error == 0 && keep > 0;
  if (number == SYS_io_submit && cutting) {
    struct iocb** const blocks = (struct iocb**)a[2];
    for (long i = 0; i < a[1]; ++i)
      if ((long)blocks[i]->aio_nbytes > keep && due()) blocks[i]->aio_nbytes = keep;
  }
  int const entering = number == IO_URING_ENTER && (int)a[0] == ring_fd;
  if (entering && cutting && a[1] > 0) cut_submissions((uint32_t)a[1]);
  long const result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  int const kept_errno = errno;
  if (number == IO_URING_SETUP && result >= 0) {
    for (int i = 0; i < 30; ++i) params[i] = ((uint32_t*)a[1])[i];
    ring_fd = (int)result;
    seen = 0;
  }
  if (entering && result >= 0) change_completions();
  if (number == SYS_io_getevents) {
    struct io_event* const events = (struct io_event*)a[3];
    for (long i = 0; i < result; ++i) events[i].res = altered(events[i].res);
  }
  errno = kept_errno;
  return result;
}
