// The backend that works everywhere: one blocking pread or pwrite per thread.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "io/backend.hpp"
#include "io/file.hpp"

namespace ds_slide {
namespace {

constexpr unsigned kMaxThreads = 128;

class Threads final : public Backend {
 public:
  explicit Threads(unsigned queue_depth) {
    unsigned const count = std::min(queue_depth, kMaxThreads);
    try {
      while (_threads.size() < count) _threads.emplace_back([this] { loop(); });
    } catch (std::system_error const& error) {
      stop();
      throw std::runtime_error("thread " + std::to_string(_threads.size()) + " of " + std::to_string(count) +
                               " cannot be started: " + errno_text(error.code().value()));
    }
  }
  ~Threads() override { stop(); }
  char const* name() const noexcept override { return "threads"; }

  void exchange(std::vector<Request*> const& starting, std::vector<Completion>& finished) override {
    std::unique_lock<std::mutex> lock(_mutex);
    _waiting.insert(_waiting.end(), starting.begin(), starting.end());
    for (std::size_t i = 0; i < starting.size(); ++i) _work.notify_one();
    _done.wait(lock, [&] { return _woken || !_finished.empty(); });
    _woken = false;
    finished.insert(finished.end(), _finished.begin(), _finished.end());
    _finished.clear();
  }

  void wake() noexcept override {
    std::lock_guard<std::mutex> lock(_mutex);
    _woken = true;
    _done.notify_one();
  }

 private:
  void loop() {
    pthread_setname_np(pthread_self(), "slide-io-worker");
    std::unique_lock<std::mutex> lock(_mutex);
    for (;;) {
      _work.wait(lock, [&] { return _stopping || !_waiting.empty(); });
      if (_waiting.empty()) return;
      Request* const request = _waiting.front();
      _waiting.pop_front();
      lock.unlock();
      ssize_t const moved =
          request->write ? ::pwrite(request->file->fd(), request->address, request->nbytes, request->offset)
                         : ::pread(request->file->fd(), request->address, request->nbytes, request->offset);
      std::int64_t const result = moved >= 0 ? moved : -static_cast<std::int64_t>(errno);
      lock.lock();
      _finished.push_back({request, result});
      _done.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(_mutex);
      _stopping = true;
    }
    _work.notify_all();
    for (std::thread& thread : _threads) thread.join();
  }

  std::mutex _mutex;  // guards everything below but _threads
  std::condition_variable _work;
  std::condition_variable _done;
  std::deque<Request*> _waiting;
  std::vector<Completion> _finished;
  bool _woken = false;
  bool _stopping = false;
  std::vector<std::thread> _threads;
};

}  // namespace

std::unique_ptr<Backend> make_threads(unsigned queue_depth) { return std::make_unique<Threads>(queue_depth); }

}  // namespace ds_slide
