#include <cstring>
#include <optional>
#include <vector>

#include "bindings/abi.hpp"
#include "io/engine.hpp"
#include "io/turns.hpp"

namespace ds_slide {
namespace {

std::optional<std::int64_t> optional(std::int64_t const* value) {
  return value == nullptr ? std::nullopt : std::optional<std::int64_t>(*value);
}

}  // namespace
}  // namespace ds_slide

using namespace ds_slide;

/// `burst_bytes` and `low_depth` may be null.
DS_SLIDE_ABI(std::int64_t, io_new,
             (IoEngine * *made, char const* backend, std::int64_t queue_depth, std::int64_t request_bytes,
              std::int64_t const* burst_bytes, std::int64_t const* low_depth)) {
  return guarded([&] {
    *made = new IoEngine(backend, queue_depth, request_bytes, optional(burst_bytes), optional(low_depth));
  });
}

/// Waits for the requests in flight.
DS_SLIDE_OWNED(io, IoEngine)

/// Into `name`, which has `room` bytes. Returns the length.
DS_SLIDE_ABI(std::int64_t, io_backend, (IoEngine const* engine, char* name, std::int64_t room)) {
  return guarded([&] { return engine->backend().copy(name, static_cast<std::size_t>(room)); });
}

/// `descriptor`: null, or that of the open file.
DS_SLIDE_ABI(std::int64_t, io_open,
             (IoEngine * engine, char const* path, std::int64_t nbytes, std::int64_t const* descriptor)) {
  return guarded([&] {
    std::optional<int> const open =
        descriptor == nullptr ? std::nullopt : std::optional<int>(static_cast<int>(*descriptor));
    return engine->open(path, nbytes, open);
  });
}

DS_SLIDE_ABI(std::int64_t, io_is_direct, (IoEngine const* engine, std::int64_t file)) {
  return guarded([&] { return engine->is_direct(file); });
}

DS_SLIDE_ABI(std::int64_t, io_register_memory,
             (IoEngine * engine, std::uint64_t address, std::int64_t nbytes)) {
  return guarded([&] { return engine->register_memory(address, count_of("nbytes", nbytes)); });
}

DS_SLIDE_ABI(std::int64_t, io_unregister_memory, (IoEngine * engine, std::uint64_t address)) {
  return guarded([&] { engine->unregister_memory(address); });
}

/// `pieces`: file, offset, address and bytes of each of the `count` pieces.
DS_SLIDE_ABI(std::int64_t, io_submit,
             (IoEngine * engine, std::int64_t token, std::int64_t write, void const* pieces,
              std::int64_t count, std::int64_t urgent)) {
  static_assert(sizeof(IoEngine::Piece) == 4 * sizeof(std::int64_t));
  return guarded([&] {
    std::vector<IoEngine::Piece> all(static_cast<std::size_t>(count));
    if (count > 0) std::memcpy(all.data(), pieces, all.size() * sizeof(IoEngine::Piece));
    engine->submit(token, write != 0, all, urgent != 0);
  });
}

/// 0: nothing has finished in time. 1: `finished` has the token and an errno, and where that is not 0
/// `slide_error` has a sentence. 2: the engine is closed and all has been told.
DS_SLIDE_ABI(std::int64_t, io_next, (IoEngine * engine, double timeout_s, std::int64_t* finished)) {
  return guarded([&] {
    std::optional<IoEngine::Finished> const next = engine->next(timeout_s);
    if (!next) return engine->closed() ? 2 : 0;
    finished[0] = next->token;
    finished[1] = next->error;
    if (next->error != 0) keep_sentence(next->message);
    return 1;
  });
}

DS_SLIDE_ABI(std::int64_t, io_sync, (IoEngine const* engine, std::int64_t file)) {
  return guarded([&] { engine->sync(file); });
}

/// Into `counts` and `seconds`, in the order of IoEngine::Stats. The sentence of `slide_error` says which
/// backends "auto" could not use.
DS_SLIDE_ABI(std::int64_t, io_stats, (IoEngine const* engine, std::int64_t* counts, double* seconds)) {
  return guarded([&] {
    IoEngine::Stats const now = engine->stats();
    std::int64_t const whole[] = {now.read_bytes,     now.written_bytes,     now.read_requests,
                                  now.write_requests, now.repeated_requests, now.in_flight,
                                  now.unfinished,     now.registered_bytes,  now.registered_files,
                                  now.direct_files,   now.buffered_files,    now.burst_bytes,
                                  now.depth};
    double const times[] = {now.busy_s, now.read_busy_s, now.write_busy_s, now.latency_s};
    std::memcpy(counts, whole, sizeof(whole));
    std::memcpy(seconds, times, sizeof(times));
    keep_sentence(now.skipped_backends);
  });
}

DS_SLIDE_ABI(std::int64_t, io_close, (IoEngine * engine)) {
  return guarded([&] { engine->close(); });
}

DS_SLIDE_ABI(std::int64_t, turns_new,
             (Turns * *made, std::int64_t const* burst_bytes, std::int64_t depth,
              std::int64_t const* low_depth)) {
  return guarded([&] { *made = new Turns(optional(burst_bytes), depth, optional(low_depth)); });
}

DS_SLIDE_OWNED(turns, Turns)

DS_SLIDE_ABI(std::int64_t, turns_writes_next,
             (Turns * turns, std::int64_t reads_wait, std::int64_t writes_wait)) {
  return turns->writes_next(reads_wait != 0, writes_wait != 0) ? 1 : 0;
}

DS_SLIDE_ABI(std::int64_t, turns_started, (Turns * turns, std::int64_t nbytes)) {
  return guarded([&] { turns->started(nbytes); });
}

DS_SLIDE_ABI(std::int64_t, turns_finished,
             (Turns * turns, std::int64_t nbytes, double now_s, std::int64_t both_wait)) {
  return guarded([&] {
    auto const since =
        std::chrono::duration_cast<Turns::Clock::duration>(std::chrono::duration<double>(now_s));
    turns->finished(nbytes, Turns::Clock::time_point(since), both_wait != 0);
  });
}

DS_SLIDE_ABI(std::int64_t, turns_burst_bytes, (Turns const* turns)) { return turns->burst_bytes(); }

DS_SLIDE_ABI(std::int64_t, turns_depth, (Turns const* turns)) { return turns->depth(); }
