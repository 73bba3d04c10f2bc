#include "io/engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

#include "io/backend.hpp"
#include "io/busy_time.hpp"
#include "io/file.hpp"
#include "io/transfer.hpp"
#include "io/turns.hpp"

namespace ds_slide {
namespace {

constexpr std::int64_t kMaxDepth = 4096;
constexpr std::int64_t kMaxRequest = std::int64_t{1} << 30;
constexpr std::int64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
constexpr double kMaxWait_s = 1e9;  // clocks count nanoseconds in 63 bits
constexpr char const* kClosed = "this IoEngine is closed; make a new one";

std::string number(std::int64_t value) { return std::to_string(value); }

void check_block_multiple(char const* what, std::int64_t value, std::size_t piece) {
  if (value >= 0 && value % kBlock == 0) return;
  throw std::invalid_argument(std::string(what) + " of piece " + std::to_string(piece) + " is " +
                              number(value) + " but must be a multiple of " + number(kBlock) +
                              " and not negative");
}

/// Threads started meanwhile get no signals: Python's handlers are for the main thread.
class QuietSignals {
 public:
  QuietSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &_before);
  }
  ~QuietSignals() { pthread_sigmask(SIG_SETMASK, &_before, nullptr); }
  QuietSignals(QuietSignals const&) = delete;
  QuietSignals& operator=(QuietSignals const&) = delete;

 private:
  sigset_t _before;
};

}  // namespace

/// Who owns what, when: a Transfer is in `transfers` from submit() until it has ended; a Request is in
/// `idle`, in `repeat`, in `starting`, or with the backend. The engine thread alone calls exchange(), without
/// `mutex`, so that submit() never waits for the device.
struct IoEngine::State {
  pid_t const owner = getpid();
  unsigned depth = 0;
  std::uint32_t request_bytes = 0;
  std::string backend_name;

  mutable std::mutex mutex;  // guards this group
  std::condition_variable told;
  std::vector<std::shared_ptr<File>> files;  // emptied by close()
  std::unordered_map<Transfer*, std::unique_ptr<Transfer>> transfers;
  TransferQueue urgent, reads, writes;
  std::deque<Finished> finished;
  std::vector<Request*> idle;
  std::deque<Request*> repeat;  // to be sent again before anything new
  std::int64_t in_flight = 0;   // requests that are not in `idle`
  Turns turns{std::nullopt, 1, std::nullopt};
  bool asleep =
      false;  // the engine thread is in, or about to enter, a wait that only wake() or a completion ends
  bool closing = false;
  Stats totals{};
  BusyTime any_busy, read_busy, write_busy;
  double latency_sum_s = 0;  // of the requests in `totals`

  // Guards `registered`, and `backend` against close() while another thread registers something with it.
  // Taken before `mutex`.
  std::mutex backend_mutex;
  std::map<std::uintptr_t, std::size_t> registered;  // address: nbytes
  std::unique_ptr<Backend> backend;                  // null when closed
  std::thread thread;

  // The engine thread's alone.
  std::vector<Request> requests;
  std::vector<Request*> starting;
  std::vector<Completion> completions;

  void run();
  void collect();
  [[nodiscard]] bool has_room(bool for_urgent) const { return for_urgent || in_flight < turns.depth(); }
  [[nodiscard]] TransferQueue& next_queue();
  void settle(Completion const& completion);
  void fail(Request const& request, int error);
  void ended(Transfer& transfer);
  [[nodiscard]] std::shared_ptr<File> const& file(std::int64_t index) const;
  void check_open() const {
    if (closing) throw std::runtime_error(kClosed);
  }
};

void IoEngine::State::run() {
  pthread_setname_np(pthread_self(), "slide-io");
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    collect();
    if (closing && in_flight == 0) return;
    asleep = true;
    lock.unlock();
    completions.clear();
    backend->exchange(starting, completions);
    lock.lock();
    asleep = false;
    for (Completion const& completion : completions) settle(completion);
  }
}

/// Fills `starting` with what may go to the device now: repeated requests, urgent ones, the others while
/// fewer than `turns` allows are there.
void IoEngine::State::collect() {
  starting.clear();
  while (!repeat.empty()) {
    starting.push_back(repeat.front());
    repeat.pop_front();
  }
  while (!idle.empty() && has_room(!urgent.empty())) {
    TransferQueue& queue = next_queue();
    if (queue.empty()) return;
    Request& request = *idle.back();
    idle.pop_back();
    queue.cut(request, request_bytes);
    ++in_flight;
    if (&queue != &urgent) turns.started(request.total);
    auto const now = BusyTime::Clock::now();
    request.started_at = now;
    any_busy.started(now);
    (request.write ? write_busy : read_busy).started(now);
    starting.push_back(&request);
  }
}

TransferQueue& IoEngine::State::next_queue() {
  if (!urgent.empty()) return urgent;
  return turns.writes_next(!reads.empty(), !writes.empty()) ? writes : reads;
}

void IoEngine::State::settle(Completion const& completion) {
  Request& request = *completion.request;
  Transfer& transfer = *request.transfer;
  Verdict verdict = judge(request, completion.result);
  if (verdict.outcome == Outcome::repeat && transfer.error == 0) {
    ++totals.repeated_requests;
    repeat.push_back(&request);
    return;
  }
  if (verdict.outcome == Outcome::done) {
    ++(request.write ? totals.write_requests : totals.read_requests);
    (request.write ? totals.written_bytes : totals.read_bytes) += request.total;
  } else if (verdict.outcome == Outcome::failed) {
    urgent.remove(transfer);
    (transfer.write ? writes : reads).remove(transfer);
    transfer.fail(verdict.error, std::move(verdict.message));
  }
  --in_flight;
  auto const now = BusyTime::Clock::now();
  any_busy.stopped(now);
  (request.write ? write_busy : read_busy).stopped(now);
  if (verdict.outcome == Outcome::done) {
    latency_sum_s += std::chrono::duration<double>(now - request.started_at).count();
    turns.finished(request.total, now, !reads.empty() && !writes.empty());
  }
  idle.push_back(&request);
  --transfer.in_flight;
  if (transfer.in_flight == 0 && transfer.all_started()) ended(transfer);
}

/// Moves a transfer to where next() finds it.
void IoEngine::State::ended(Transfer& transfer) {
  finished.push_back({transfer.token, transfer.error, std::move(transfer.message)});
  transfers.erase(&transfer);
  told.notify_one();
}

std::shared_ptr<File> const& IoEngine::State::file(std::int64_t index) const {
  if (index < 0 || index >= static_cast<std::int64_t>(files.size())) {
    throw std::invalid_argument("file number " + number(index) +
                                " was not given by open(), which has given " + std::to_string(files.size()) +
                                " of them");
  }
  return files[static_cast<std::size_t>(index)];
}

IoEngine::IoEngine(std::string const& backend, std::int64_t queue_depth, std::int64_t request_bytes,
                   std::optional<std::int64_t> burst_bytes, std::optional<std::int64_t> low_depth)
    : _state(std::make_unique<State>()) {
  if (queue_depth < 1 || queue_depth > kMaxDepth) {
    throw std::invalid_argument("queue_depth is " + number(queue_depth) + " but must be from 1 to " +
                                number(kMaxDepth));
  }
  if (request_bytes < kBlock || request_bytes > kMaxRequest || request_bytes % kBlock != 0) {
    throw std::invalid_argument("request_bytes is " + number(request_bytes) + " but must be a multiple of " +
                                number(kBlock) + " up to " + number(kMaxRequest));
  }
  if (burst_bytes.value_or(0) < 0) {
    throw std::invalid_argument("burst_bytes is " + number(*burst_bytes) + " but must not be negative");
  }
  if (low_depth && (*low_depth < 1 || *low_depth > queue_depth)) {
    throw std::invalid_argument("low_depth is " + number(*low_depth) +
                                " but must be from 1 to queue_depth, " + number(queue_depth));
  }
  State& state = *_state;
  state.turns = Turns(burst_bytes, queue_depth, low_depth);
  state.depth = static_cast<unsigned>(queue_depth);
  state.request_bytes = static_cast<std::uint32_t>(request_bytes);
  state.requests.resize(state.depth);
  for (Request& request : state.requests) state.idle.push_back(&request);
  QuietSignals const quiet;
  state.backend = make_backend(backend, state.depth, state.totals.skipped_backends);
  state.backend_name = state.backend->name();
  state.thread = std::thread([&state] { state.run(); });
}

IoEngine::~IoEngine() {
  // In a forked child the threads do not exist and the ring is the parent's. The child leaks what it
  // inherited.
  if (_state->owner != getpid()) {
    static_cast<void>(_state.release());
    return;
  }
  close();
}

IoEngine::State& IoEngine::state() const {
  if (_state->owner != getpid()) {
    throw std::runtime_error(
        "this IoEngine was made before this process was forked and its thread exists only in the parent; "
        "make a new IoEngine in the child");
  }
  return *_state;
}

std::string IoEngine::backend() const { return _state->backend_name; }

std::int64_t IoEngine::open(std::string const& path, std::int64_t nbytes, std::optional<int> descriptor) {
  State& state = this->state();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.check_open();
  }
  auto file = std::make_shared<File>(path, nbytes, descriptor);
  std::lock_guard<std::mutex> backend_lock(state.backend_mutex);
  bool const registered = state.backend != nullptr && state.backend->register_file(*file);
  std::lock_guard<std::mutex> lock(state.mutex);
  state.check_open();
  state.totals.registered_files += registered;
  ++(file->direct() ? state.totals.direct_files : state.totals.buffered_files);
  state.files.push_back(std::move(file));
  return static_cast<std::int64_t>(state.files.size()) - 1;
}

bool IoEngine::is_direct(std::int64_t file) const {
  State& state = this->state();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.check_open();
  return state.file(file)->direct();
}

void IoEngine::sync(std::int64_t file) const {
  State& state = this->state();
  std::shared_ptr<File> target;  // keeps the descriptor through a close() meanwhile
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.check_open();
    target = state.file(file);
  }
  target->sync();
}

bool IoEngine::register_memory(std::uintptr_t address, std::size_t nbytes) {
  State& state = this->state();
  if (address == 0 || address % kBlock != 0 || nbytes == 0 || address + nbytes < address) {
    throw std::invalid_argument("memory at " + std::to_string(address) + " of " + std::to_string(nbytes) +
                                " bytes cannot be registered; give a multiple of 4096 and a positive length");
  }
  std::lock_guard<std::mutex> backend_lock(state.backend_mutex);
  if (state.backend == nullptr) throw std::runtime_error(kClosed);
  auto const next = state.registered.upper_bound(address);
  bool const overlaps_next = next != state.registered.end() && next->first < address + nbytes;
  bool const overlaps_previous =
      next != state.registered.begin() && std::prev(next)->first + std::prev(next)->second > address;
  if (overlaps_next || overlaps_previous) {
    throw std::invalid_argument("memory at " + std::to_string(address) + " of " + std::to_string(nbytes) +
                                " bytes overlaps memory that is registered already");
  }
  if (!state.backend->register_memory(address, nbytes)) return false;
  state.registered[address] = nbytes;
  std::lock_guard<std::mutex> lock(state.mutex);
  state.totals.registered_bytes += static_cast<std::int64_t>(nbytes);
  return true;
}

void IoEngine::unregister_memory(std::uintptr_t address) {
  State& state = this->state();
  std::lock_guard<std::mutex> backend_lock(state.backend_mutex);
  auto const found = state.registered.find(address);
  if (found == state.registered.end()) return;
  state.backend->unregister_memory(address);
  std::lock_guard<std::mutex> lock(state.mutex);
  state.totals.registered_bytes -= static_cast<std::int64_t>(found->second);
  state.registered.erase(found);
}

void IoEngine::submit(std::int64_t token, bool write, std::vector<Piece> const& pieces, bool urgent) {
  State& state = this->state();
  auto transfer = std::make_unique<Transfer>();
  transfer->token = token;
  transfer->write = write;
  transfer->pieces.reserve(pieces.size());
  std::lock_guard<std::mutex> lock(state.mutex);
  state.check_open();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    Piece const& piece = pieces[i];
    check_block_multiple("offset", piece.offset, i);
    check_block_multiple("nbytes", piece.nbytes, i);
    check_block_multiple("address", static_cast<std::int64_t>(piece.address), i);
    if (piece.nbytes == 0 || piece.address == 0 || piece.offset > kMaxOffset - piece.nbytes) {
      throw std::invalid_argument(
          "piece " + std::to_string(i) + " has no bytes, no memory or an offset beyond " +
          "what a file can have: offset " + number(piece.offset) + ", " + number(piece.nbytes) + " bytes");
    }
    transfer->pieces.push_back(
        {state.file(piece.file).get(), piece.offset, reinterpret_cast<char*>(piece.address), piece.nbytes});
  }
  Transfer& queued = *transfer;
  state.transfers.emplace(&queued, std::move(transfer));
  if (queued.all_started()) {  // no pieces
    state.ended(queued);
    return;
  }
  (urgent ? state.urgent : write ? state.writes : state.reads).push(queued);
  if (!state.asleep || state.idle.empty() || !state.has_room(urgent)) return;
  state.asleep = false;  // one wake-up serves all that is queued before the thread looks
  state.backend->wake();
}

std::optional<IoEngine::Finished> IoEngine::next(double timeout_s) {
  State& state = this->state();
  double const seconds = std::isnan(timeout_s) ? 0 : std::clamp(timeout_s, 0.0, kMaxWait_s);
  auto const limit =
      std::chrono::duration_cast<BusyTime::Clock::duration>(std::chrono::duration<double>(seconds));
  std::unique_lock<std::mutex> lock(state.mutex);
  state.told.wait_until(lock, BusyTime::Clock::now() + limit, [&] {
    return !state.finished.empty() || (state.closing && state.transfers.empty());
  });
  if (state.finished.empty()) return std::nullopt;
  Finished result = std::move(state.finished.front());
  state.finished.pop_front();
  return result;
}

bool IoEngine::closed() const {
  State& state = this->state();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.closing && state.transfers.empty() && state.finished.empty();
}

IoEngine::Stats IoEngine::stats() const {
  State& state = this->state();
  std::lock_guard<std::mutex> lock(state.mutex);
  Stats result = state.totals;
  auto const now = BusyTime::Clock::now();
  result.busy_s = state.any_busy.seconds(now);
  result.read_busy_s = state.read_busy.seconds(now);
  result.write_busy_s = state.write_busy.seconds(now);
  result.in_flight = state.in_flight;
  result.burst_bytes = state.turns.burst_bytes();
  result.depth = state.turns.depth();
  std::int64_t const done = result.read_requests + result.write_requests;
  result.latency_s = done > 0 ? state.latency_sum_s / static_cast<double>(done) : 0.0;
  result.unfinished = static_cast<std::int64_t>(state.transfers.size());
  return result;
}

void IoEngine::close() {
  State& state = this->state();
  std::lock_guard<std::mutex> backend_lock(state.backend_mutex);  // a second caller waits until all is done
  if (state.backend == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.closing = true;
    for (TransferQueue* queue : {&state.urgent, &state.reads, &state.writes}) {
      while (Transfer* transfer = queue->pop()) {
        transfer->fail(ECANCELED, "transfer " + number(transfer->token) +
                                      " was dropped because the IoEngine was closed before it was finished");
        if (transfer->in_flight == 0) state.ended(*transfer);
      }
    }
    state.backend->wake();
  }
  if (state.thread.joinable()) state.thread.join();
  state.backend.reset();
  state.registered.clear();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.totals.registered_bytes = 0;
  state.files.clear();
  state.told.notify_all();
}

}  // namespace ds_slide
