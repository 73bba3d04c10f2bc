// Hammers the I/O engine on every backend from several threads at once. Built with a sanitizer by
// run_sanitizers.sh: a race, an overrun or undefined behaviour ends it with a report, a wrong byte with
// status 1. Usage: io_stress FOLDER     (where its files go)
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "io/engine.hpp"
#include "io/file.hpp"

namespace {

using namespace ds_slide;

constexpr int kThreads = 4;
constexpr int kRounds = 150;
constexpr std::size_t kExtent = 16 * kBlock;  // of one thread in one file
constexpr int kFiles = 2;

void require(bool condition, std::string const& what) {
  if (condition) return;
  std::fprintf(stderr, "io_stress: %s\n", what.c_str());
  std::_Exit(1);
}

using Memory = std::unique_ptr<unsigned char, void (*)(void*)>;
Memory make_memory(std::size_t nbytes) {
  return {static_cast<unsigned char*>(std::aligned_alloc(kBlock, nbytes)), std::free};
}

unsigned char byte_of(int thread, int round, std::size_t at) {
  return static_cast<unsigned char>(thread * 61 + round * 7 + static_cast<int>(at / 64));
}

/// Waits until each of its own transfers is told. It may get transfers of other threads and marks them done.
class Completions {
 public:
  Completions(IoEngine& engine, std::size_t tokens) : _engine(engine), _done(tokens) {}
  void wait_for(std::int64_t token) {
    while (!_done[static_cast<std::size_t>(token)].load()) {
      std::optional<IoEngine::Finished> const finished = _engine.next(0.01);
      if (!finished) continue;
      require(finished->error == 0, finished->message);
      require(!_done[static_cast<std::size_t>(finished->token)].exchange(true), "a transfer was told twice");
    }
  }

 private:
  IoEngine& _engine;
  std::vector<std::atomic<bool>> _done;
};

/// Writes and reads back pieces in both files, beside the pieces of other threads.
void transfers(IoEngine& engine, Completions& completions, int thread,
               std::vector<std::int64_t> const& files) {
  Memory const memory = make_memory(2 * kFiles * kExtent);
  bool const registered =
      thread % 2 == 0 &&
      engine.register_memory(reinterpret_cast<std::uintptr_t>(memory.get()), kFiles * kExtent);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<IoEngine::Piece> write, read;
    for (int i = 0; i < kFiles; ++i) {
      auto const place = static_cast<std::size_t>(i) * kExtent;
      for (std::size_t at = 0; at < kExtent; ++at)
        memory.get()[place + at] = byte_of(thread, round, place + at);
      auto const address = reinterpret_cast<std::uintptr_t>(memory.get() + place);
      std::int64_t const offset = thread * static_cast<std::int64_t>(kExtent);
      write.push_back({files[static_cast<std::size_t>(i)], offset, address, kExtent});
      read.push_back({files[static_cast<std::size_t>(i)], offset, address + kFiles * kExtent, kExtent});
    }
    std::int64_t const token = 2 * (thread * kRounds + round);
    engine.submit(token, true, write, false);
    completions.wait_for(token);
    engine.submit(token + 1, false, read, round % 3 == 0);
    completions.wait_for(token + 1);
    require(std::memcmp(memory.get(), memory.get() + kFiles * kExtent, kFiles * kExtent) == 0,
            "other bytes were read than were written");
    if (round % 16 == 0) static_cast<void>(engine.stats());
    if (round % 64 == 0) engine.sync(files[0]);
  }
  if (registered) engine.unregister_memory(reinterpret_cast<std::uintptr_t>(memory.get()));
}

/// A transfer past the end of the file fails once, among others that do not.
void failures(IoEngine& engine, std::int64_t file, std::int64_t file_bytes) {
  constexpr std::uintptr_t kEach = 8 * kBlock;
  Memory const memory = make_memory(64 * kEach);
  for (std::int64_t token = 0; token < 64; ++token) {
    std::int64_t const offset = token % 2 == 0 ? 0 : file_bytes - kBlock;
    auto const address =
        reinterpret_cast<std::uintptr_t>(memory.get()) + static_cast<unsigned>(token) * kEach;
    engine.submit(token, false, {{file, offset, address, kEach}}, token % 5 == 0);
  }
  int failed = 0;
  for (int i = 0; i < 64; ++i) {
    std::optional<IoEngine::Finished> const finished = engine.next(60);
    require(finished.has_value(), "a transfer was not told");
    require((finished->error != 0) == (finished->token % 2 == 1), "wrong outcome: " + finished->message);
    failed += finished->error != 0;
  }
  require(failed == 32 && !engine.next(0), "a transfer was told more than once");
}

/// close() in the middle of the work of others: they see refusals and cancellations, nothing else.
void closing(std::string const& backend, std::string const& path) {
  for (int round = 0; round < 8; ++round) {
    IoEngine engine(backend, 3, kBlock);
    std::int64_t const file = engine.open(path, 0);
    constexpr int kTransfers = 20;
    Memory const memory = make_memory(kThreads * kTransfers * kExtent);
    std::atomic<int> submitted{0}, told{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        try {
          for (int i = 0; i < kTransfers; ++i) {
            // Memory of its own for each transfer: they run at the same time.
            auto const place = static_cast<std::size_t>(thread * kTransfers + i);
            auto const address = reinterpret_cast<std::uintptr_t>(memory.get()) + place * kExtent;
            engine.submit(i, false, {{file, 0, address, kExtent}}, i % 4 == 0);
            ++submitted;
            if (engine.next(0)) ++told;
          }
        } catch (std::runtime_error const&) {
        }
      });
    }
    std::thread closer([&] { engine.close(); });
    engine.close();
    closer.join();
    for (std::thread& thread : threads) thread.join();
    while (engine.next(0)) ++told;
    require(told == submitted, "close() lost a transfer");
  }
}

void all_of(std::string const& backend, std::string const& folder) {
  std::unique_ptr<IoEngine> engine;
  try {
    engine = std::make_unique<IoEngine>(backend, 6, 3 * kBlock, std::nullopt, 2);
  } catch (std::runtime_error const& error) {
    std::printf("io_stress: left out, %s\n", error.what());
    return;
  }
  std::vector<std::int64_t> files;
  std::vector<std::string> paths;
  constexpr std::int64_t kFileBytes = kThreads * static_cast<std::int64_t>(kExtent);
  for (int i = 0; i < kFiles; ++i) {
    paths.push_back(folder + "/io_stress_" + std::to_string(getpid()) + "_" + std::to_string(i));
    files.push_back(engine->open(paths.back(), kFileBytes));
  }
  {
    Completions completions(*engine, 2 * kThreads * kRounds);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] { transfers(*engine, completions, thread, files); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  failures(*engine, files[0], kFileBytes);
  closing(backend, paths[0]);
  engine.reset();
  for (std::string const& path : paths) ::unlink(path.c_str());
  std::printf("io_stress: %s ok\n", backend.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  std::string const folder = argc > 1 ? argv[1] : ".";
  for (char const* backend : {"io_uring", "libaio", "threads"}) all_of(backend, folder);
  return 0;
}
