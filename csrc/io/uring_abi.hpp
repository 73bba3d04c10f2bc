#pragma once

// The part of the kernel's io_uring interface that uring.cpp uses, under our own names. The layout never
// changes, but <linux/io_uring.h> may be missing or older than the running kernel where we are built, and
// liburing may be absent.
#include <cstddef>
#include <cstdint>

namespace ds_slide::uring {

// The same numbers on every architecture but alpha.
constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr long kRegister = 427;

struct SubmissionOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  std::uint64_t user_address;
};

struct CompletionOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, entries, flags, reserved;
  std::uint64_t user_address;
};

struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SubmissionOffsets sq;
  CompletionOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct Submission {
  std::uint8_t opcode, flags;
  std::uint16_t priority;
  std::int32_t fd;  // or the number of a registered file
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t nbytes;
  std::uint32_t operation_flags;  // poll: the events
  std::uint64_t user_data;
  std::uint16_t buffer;  // number of a registered buffer
  std::uint16_t personality;
  std::uint32_t splice_fd;
  std::uint64_t reserved[2];
};
static_assert(sizeof(Submission) == 64 && offsetof(Submission, user_data) == 32);

struct Completion {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
static_assert(sizeof(Completion) == 16);

struct ResourceTable {
  std::uint32_t count, flags;
  std::uint64_t reserved, data, tags;
};

struct ResourceUpdate {
  std::uint32_t first, reserved;
  std::uint64_t data, tags;
  std::uint32_t count, reserved2;
};

struct FilesUpdate {
  std::uint32_t first, reserved;
  std::uint64_t fds;
};

enum Opcode : std::uint8_t { kReadFixed = 4, kWriteFixed = 5, kPollAdd = 6, kRead = 22, kWrite = 23 };

constexpr std::uint8_t kFixedFile = 1;
constexpr std::uint32_t kSetupCoopTaskrun = 1u << 8;  // Linux 5.19
constexpr std::uint32_t kFeatureSingleMmap = 1u;
constexpr unsigned kEnterGetEvents = 1;

constexpr long kMapSubmissionRing = 0;
constexpr long kMapCompletionRing = 0x8000000;
constexpr long kMapSubmissions = 0x10000000;

enum Registration : unsigned {
  kUnregisterBuffers = 1,
  kRegisterFiles = 2,
  kUnregisterFiles = 3,
  kUpdateFiles = 6,
  kRegisterBuffers2 = 15,  // Linux 5.13: a table of buffers that can change while requests are in flight
  kUpdateBuffers = 16,
};
constexpr std::uint32_t kSparse = 1;  // flag of a ResourceTable, Linux 5.19

}  // namespace ds_slide::uring
