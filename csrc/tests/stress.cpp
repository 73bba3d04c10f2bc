// Hammers the threads, the kernels, the slabs and the pool from several callers at once. Built with a
// sanitizer by run_sanitizers.sh: a race, an overrun or undefined behaviour ends it with a report, a wrong
// bit with status 1.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "checksum/checksum.hpp"
#include "memory/generations.hpp"
#include "memory/pool.hpp"
#include "memory/slab.hpp"
#include "threads/workers.hpp"
#include "update/update.hpp"

namespace {

using namespace ds_slide;

constexpr int kCallers = 4;
constexpr int kRounds = 12;

void require(bool condition, char const* what) {
  if (condition) return;
  std::fprintf(stderr, "stress: %s\n", what);
  std::exit(1);
}

/// The state buffers of one update in exactly sized allocations, so that an overrun leaves them. Room for
/// 4-byte elements.
struct StateBuffers {
  explicit StateBuffers(std::size_t numel, unsigned seed)
      : numel(numel),
        words(5, std::vector<std::uint32_t>(numel)),
        scales(2, std::vector<float>((numel + kStateGroup - 1) / kStateGroup, 1.0f)) {
    std::uint32_t state = seed * 2654435761u + 1;
    for (auto& state_buffer : words) {
      for (std::uint32_t& word : state_buffer) {
        state = state * 1664525u + 1013904223u;
        word = (state & 0x83FF83FFu) | 0x3C003C00u;  // ordinary numbers of either sign, also as fp16 and bf16
      }
    }
    for (std::uint32_t& word : words[3]) word &= 0x7FFFFFFFu;  // exp_avg_sq is not negative
  }
  UpdateArrays arrays() {
    // The last groups of this unit have numbers beyond 2^32.
    return {words[0].data(),
            words[0].data(),
            words[1].data(),
            words[4].data(),
            {words[2].data(), words[3].data()},
            {scales[0].data(), scales[1].data()},
            (std::uint64_t{1} << 32) - 32768};
  }
  bool operator==(StateBuffers const& other) const { return words == other.words && scales == other.scales; }
  std::size_t numel;
  std::vector<std::vector<std::uint32_t>> words;
  std::vector<std::vector<float>> scales;
};

KernelTable const& kernels_for(unsigned index) {
  return kernels_of(static_cast<Isa>(index % (1 + static_cast<unsigned>(best_isa()))));
}

/// Ordinary numbers for any rule. A rule reads the first ones, up to its own count.
UpdateNumbers numbers_of_a_step() {
  return {{0.5f, 0.99f, 0.1f, 0.9f, 0.1f, 0.95f, 0.05f, 2.5f, 4e-3f, 1e-8f}, rounding_key_of(0, 3)};
}

/// The state formats that `rule` supports.
std::vector<StateFormat> formats_of(Rule rule) {
  std::vector<StateFormat> found;
  for (int state = 0; state < kNumStateFormats; ++state) {
    if (portable_kernels().rules[static_cast<int>(rule)].update[0][state][0][0] != nullptr)
      found.push_back(static_cast<StateFormat>(state));
  }
  return found;
}

/// The passes that make a whole step of `rule`: one, or where it has them two.
std::vector<Pass> passes_of(Rule rule) {
  auto const& two = portable_kernels().rules[static_cast<int>(rule)].update[static_cast<int>(Pass::states)];
  if (two[0][0][0] == nullptr) return {Pass::whole};
  return {Pass::weights, Pass::states};
}

/// A step with a log, and the way back from it.
void there_and_back(Workers& workers, KernelTable const& kernels, Rule rule, WeightFormat format, Dtype dtype,
                    StateBuffers& buffers, UpdateNumbers const& numbers) {
  std::vector<std::vector<std::uint8_t>> low(1 + kMaxStates, std::vector<std::uint8_t>(buffers.numel));
  std::vector<SliceLog> slices((buffers.numel + kUpdateSlice - 1) / kUpdateSlice);
  UpdateArrays arrays = buffers.arrays();
  for (std::size_t k = 0; k < low.size(); ++k) arrays.low[k] = low[k].data();
  arrays.slices = slices.data();
  for (Pass const pass : {Pass::with_log, Pass::back})
    update(workers, kernels, rule, pass, StateFormat::fp32, format, dtype, arrays, buffers.numel, numbers);
}

/// A step out of place, into exactly sized allocations that begin in cache lines of their own, and what it
/// leaves put in place.
void elsewhere(Workers& workers, KernelTable const& kernels, Rule rule, WeightFormat format, Dtype dtype,
               StateBuffers& buffers, UpdateNumbers const& numbers) {
  std::align_val_t const line{kCacheLine};
  std::size_t const bytes = buffers.numel * sizeof(std::uint32_t);
  void* written[2 + kMaxStates];
  for (std::size_t k = 0; k < 2 + kMaxStates; ++k) {
    written[k] = ::operator new(bytes, line);
    std::memcpy(written[k], buffers.words[k].data(), bytes);
  }
  UpdateArrays arrays = buffers.arrays();
  arrays.new_weight = written[0];
  arrays.new_remainder = written[1];
  for (std::size_t k = 0; k < kMaxStates; ++k) arrays.new_states[k] = written[2 + k];
  update(workers, kernels, rule, Pass::out_of_place, StateFormat::fp32, format, dtype, arrays, buffers.numel,
         numbers);
  for (std::size_t k = 0; k < 2 + kMaxStates; ++k) {
    std::memcpy(buffers.words[k].data(), written[k], bytes);
    ::operator delete(written[k], line);
  }
}

/// Calls from several threads on one Workers object; every result equals the result of a single thread.
void shared_workers() {
  Workers shared(3, {});
  UpdateNumbers const numbers = numbers_of_a_step();
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&shared, &numbers, caller] {
      Workers alone(1, {});
      for (unsigned round = 0; round < kRounds; ++round) {
        std::size_t const numel = 40000u + 7919u * caller + round;
        auto const rule = static_cast<Rule>((caller + round) % kNumRules);
        auto const formats = formats_of(rule);
        auto const state = formats[(caller + round / 3) % formats.size()];
        auto const format = static_cast<WeightFormat>((caller + round) % kNumWeightFormats);
        auto const dtype = static_cast<Dtype>(round % kNumDtypes);
        StateBuffers actual(numel, caller * 100 + round);
        StateBuffers expected = actual;
        if (state == StateFormat::fp32 && round % 2 == 1) {
          elsewhere(shared, kernels_for(round), rule, format, dtype, actual, numbers);
        } else {
          for (Pass const pass : passes_of(rule))
            update(shared, kernels_for(round), rule, pass, state, format, dtype, actual.arrays(), numel,
                   numbers);
        }
        update(alone, portable_kernels(), rule, Pass::whole, state, format, dtype, expected.arrays(), numel,
               numbers);
        require(actual == expected, "an update differs");
        if (state == StateFormat::fp32 && format != WeightFormat::fp16_master) {
          there_and_back(shared, kernels_for(round), rule, format, dtype, actual, numbers);
          require(actual == expected, "an update was not undone");
        }

        double const sum =
            sum_of_squares(shared, kernels_for(round + 1), actual.words[4].data(), dtype, numel);
        require(sum == sum_of_squares(alone, portable_kernels(), expected.words[4].data(), dtype, numel),
                "a sum differs");

        accumulate(shared, kernels_for(round + 2), actual.words[2].data(), Dtype::fp32,
                   actual.words[4].data(), dtype, numel);
        accumulate(alone, portable_kernels(), expected.words[2].data(), Dtype::fp32, expected.words[4].data(),
                   dtype, numel);
        require(actual.words == expected.words, "an accumulation differs");
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

/// 16-bit state buffers at the very end of their allocations, every length of the last vector.
void exact_ends() {
  Workers workers(2, {});
  UpdateNumbers const numbers = numbers_of_a_step();
  for (unsigned isa = 0; isa < 3; ++isa) {
    for (std::size_t numel = 0; numel < 70; ++numel) {
      std::vector<std::uint16_t> weight(numel, 0x3F80), remainder(numel, 0x0123), grad(numel, 0x3F00);
      std::vector<float> first(numel, 0.5f), second(numel, 0.25f);
      std::vector<std::uint16_t> halves(numel, 0x3F80), half_squares(numel, 0x3E80);
      std::vector<std::uint8_t> codes(numel, 0x85), square_codes(numel, 0x7F);
      std::vector<float> scales((numel + kStateGroup - 1) / kStateGroup, 0.5f), square_scales = scales;
      void* const states[kNumStateFormats][kMaxStates] = {{first.data(), second.data()},
                                                          {halves.data(), half_squares.data()},
                                                          {codes.data(), square_codes.data()}};
      for (int rule = 0; rule < kNumRules; ++rule) {
        for (StateFormat const format : formats_of(static_cast<Rule>(rule))) {
          void* const* const own = states[static_cast<int>(format)];
          for (Pass const pass : passes_of(static_cast<Rule>(rule))) {
            update(workers, kernels_for(isa), static_cast<Rule>(rule), pass, format, WeightFormat::bf16_split,
                   Dtype::bf16,
                   {weight.data(),
                    weight.data(),
                    remainder.data(),
                    grad.data(),
                    {own[0], own[1]},
                    {scales.data(), square_scales.data()}},
                   numel, numbers);
          }
        }
      }
      for (int rule = 0; rule < kNumRules && numel > 0; ++rule) {
        StateBuffers buffers(numel, isa), old = buffers;
        there_and_back(workers, kernels_for(isa), static_cast<Rule>(rule), WeightFormat::bf16_split,
                       Dtype::bf16, buffers, numbers);
        require(buffers == old, "an update was not undone");
        elsewhere(workers, kernels_for(isa), static_cast<Rule>(rule), WeightFormat::bf16_split, Dtype::bf16,
                  buffers, numbers);
        update(workers, kernels_for(isa), static_cast<Rule>(rule), Pass::whole, StateFormat::fp32,
               WeightFormat::bf16_split, Dtype::bf16, old.arrays(), numel, numbers);
        require(buffers == old, "an update out of place differs");
      }
      std::vector<float> masters(numel);
      std::vector<std::uint16_t> const weight_before = weight, remainder_before = remainder;
      join(workers, kernels_for(isa), masters.data(), weight.data(), remainder.data(), numel);
      split(workers, kernels_for(isa), masters.data(), weight.data(), remainder.data(), numel);
      require(weight == weight_before && remainder == remainder_before, "masters were not split as before");
      accumulate(workers, kernels_for(isa), grad.data(), Dtype::bf16, weight.data(), Dtype::fp16, numel);
      require(sum_of_squares(workers, kernels_for(isa), grad.data(), Dtype::bf16, numel) >= 0.0,
              "a sum is negative");
    }
  }
}

/// Threads that start and end while others do, some before their first call, some right after their last.
void short_lives() {
  std::vector<std::thread> makers;
  for (int maker = 0; maker < kCallers; ++maker) {
    makers.emplace_back([] {
      for (int round = 0; round < kRounds; ++round) {
        Workers workers(1 + round % 4, {});
        std::vector<std::uint32_t> counts(1000);
        for (int call = 0; call < round % 5; ++call) {
          workers.parallel_for(counts.size(), [&](std::size_t index) { ++counts[index]; });
        }
        for (std::uint32_t const count : counts)
          require(count == static_cast<std::uint32_t>(round % 5), "a slice ran twice or not");
        bool refused = false;
        try {
          Workers unpinnable(2, {1 << 20});
        } catch (std::runtime_error const&) {
          refused = true;
        }
        require(refused, "a core that does not exist was accepted");
      }
    });
  }
  for (std::thread& maker : makers) maker.join();
}

/// Slabs written by all threads to their last byte.
void slabs() {
  Workers workers(4, {});
  for (int round = 0; round < kRounds; ++round) {
    std::size_t const nbytes = 100000u + 4097u * static_cast<unsigned>(round);
    Slab slab(nbytes, false, round % 2 == 1);
    auto* const bytes = static_cast<unsigned char*>(slab.data());
    std::size_t const slices = 16;
    workers.parallel_for(slices, [&](std::size_t index) {
      std::size_t const begin = nbytes * index / slices, end = nbytes * (index + 1) / slices;
      std::memset(bytes + begin, static_cast<int>(index), end - begin);
    });
    require(bytes[0] == 0 && bytes[nbytes - 1] == slices - 1, "a slab lost what was written");
    slab.close();
    slab.close();
  }
}

/// More threads than buffers: each finds its buffer as it left it, nothing is lost.
void pooled() {
  constexpr std::size_t kBuffers = 3, kBytes = 3 * 4096 + 100;
  Pool pool(kBytes, kBuffers, false, false);
  std::vector<std::thread> users;
  for (int user = 0; user < 8; ++user) {
    users.emplace_back([&, user] {
      for (int round = 0; round < 400; ++round) {
        auto lease = pool.try_lease();
        for (; lease == nullptr; lease = pool.try_lease()) std::this_thread::yield();
        auto* const bytes = static_cast<unsigned char*>(lease->data());
        std::memset(bytes, user, kBytes);
        for (std::size_t at = 0; at < kBytes; at += 511)
          require(bytes[at] == user, "a buffer was lent twice");
        if (round % 3 == 0) {
          std::thread other([&] { lease->release(); });  // two threads return it, once counts
          lease->release();
          other.join();
          require(lease->data() == nullptr, "a released lease still has memory");
        }
      }
    });
  }
  for (std::thread& user : users) user.join();
  auto const statistics = pool.statistics();
  require(statistics.free == kBuffers && statistics.leased_peak == kBuffers, "a buffer was lost");
}

/// close() in the middle: every thread gets an error, lent buffers stay usable and are freed as they return.
void closed_pool() {
  for (int round = 0; round < 4 * kRounds; ++round) {
    auto pool = std::make_unique<Pool>(8192, 2, false, false);
    auto first = pool->try_lease();
    std::atomic<int> refused{0};
    std::vector<std::thread> users;
    for (int user = 0; user < kCallers; ++user) {
      users.emplace_back([&] {
        try {
          for (;;) {
            if (auto const lease = pool->try_lease()) std::memset(lease->data(), 1, lease->nbytes());
          }
        } catch (std::runtime_error const&) {
          ++refused;
        }
      });
    }
    if (round % 2 == 0) std::this_thread::yield();
    pool->close();
    for (std::thread& user : users) user.join();
    require(refused == kCallers, "a thread outlived the pool");
    require(pool->statistics().bytes == 8192, "a free buffer was kept");
    pool.reset();
    std::memset(first->data(), 2, first->nbytes());
  }
}

/// Readers that wait for what the owner has written, and let it go on when they have read it.
void generations() {
  constexpr std::uint32_t kLast = 4000;
  constexpr std::size_t kUnits = 3;
  Slab memory(Generations::bytes(kUnits), false, false), answers(Generations::bytes(kCallers), false, false);
  std::vector<std::uint32_t> written(kUnits);  // plain memory: only the counters order its reads and writes
  std::vector<std::thread> readers;
  for (unsigned reader = 0; reader < kCallers; ++reader) {
    readers.emplace_back([&, reader] {
      Generations owner(memory.data(), kUnits), own(answers.data(), kCallers);
      for (std::uint32_t round = 1; round <= kLast; ++round) {
        std::size_t const unit = round % kUnits;
        require(owner.wait(unit, round) == Generations::Outcome::kReached,
                "a wait ended without its counter");
        require(written[unit] == round, "a generation was read that was not there");
        own.publish(reader, round);
      }
    });
  }
  Generations owner(memory.data(), kUnits), others(answers.data(), kCallers);
  for (std::uint32_t round = 1; round <= kLast; ++round) {
    written[round % kUnits] = round;
    owner.publish(round % kUnits, round);
    for (unsigned reader = 0; reader < kCallers; ++reader) {
      require(others.wait(reader, round) == Generations::Outcome::kReached, "an answer was lost");
    }
  }
  for (std::thread& reader : readers) reader.join();
}

/// Ranks at a board: each writes its row, tells the others, and waits until all have come to the same round.
void boards() {
  constexpr std::uint32_t kLast = 2000;
  Slab memory(Generations::bytes(2 * kCallers), false, false);
  // Plain memory, by round and rank. Two rounds are enough: a rank writes the next but one when all have
  // read.
  std::vector<std::uint32_t> texts(2 * kCallers);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < kCallers; ++rank) {
    ranks.emplace_back([&, rank] {
      Generations board(memory.data(), 2 * kCallers);
      auto const all_have_come = [&](std::uint32_t round) {
        for (std::size_t other = 0; other < kCallers; ++other) {
          if (board.value(2 * other + 1) < round) return false;
        }
        return true;
      };
      for (std::uint32_t round = 1; round <= kLast; ++round) {
        texts[round % 2 * kCallers + rank] = round;
        board.store(2 * rank, round);
        board.publish(2 * rank + 1, round);
        for (;;) {
          std::uint32_t const seen = board.changes();
          if (all_have_come(round)) break;
          board.wait_change(seen);
        }
        for (std::size_t other = 0; other < kCallers; ++other) {
          require(board.value(2 * other) >= round, "a number that was stored before was not seen");
          require(texts[round % 2 * kCallers + other] == round, "a text was read that was not there");
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// Waits that no publish ends: closing ends all waits, interrupting the waits of one object, at any moment.
void ended_generations() {
  for (int round = 0; round < 100 * kRounds; ++round) {
    bool const closes = round % 2 == 0;
    Slab memory(Generations::bytes(1), false, false);
    Generations owner(memory.data(), 1), mine(memory.data(), 1);
    std::vector<std::thread> waiting;
    for (int waiter = 0; waiter < kCallers; ++waiter) {
      waiting.emplace_back([&] {
        auto const expected = closes ? Generations::Outcome::kClosed : Generations::Outcome::kInterrupted;
        require(mine.wait(0, 2) == expected, "a wait ended for another reason");
        require(mine.wait(0, 1) == Generations::Outcome::kReached, "what was published before was lost");
      });
    }
    owner.publish(0, 1);
    if (round % 3 == 0) std::this_thread::yield();
    closes ? owner.close() : mine.interrupt();
    for (std::thread& waiter : waiting) waiter.join();
    require(closes || owner.wait(0, 1) == Generations::Outcome::kReached, "another object was interrupted");
    bool refused = false;
    try {
      owner.publish(1, 1);
    } catch (std::out_of_range const&) {
      refused = true;
    }
    require(refused, "a counter that does not exist was raised");
  }
}

/// Two mappings of one memory file show the same bytes, and a part that the file does not have is refused.
void shared_slabs() {
  int const file = memfd_create("stress", MFD_CLOEXEC);
  require(file >= 0 && ftruncate(file, 3 * 4096) == 0, "no memory file");
  Slab first(file, 4096, 5000, false, false), second(file, 4096, 5000, false, true);
  bool refused = false;
  try {
    Slab beyond(file, 8192, 5000, false, false);
  } catch (std::invalid_argument const&) {
    refused = true;
  }
  require(refused, "a mapping beyond the end of a file was made");
  ::close(file);
  std::memset(first.data(), 7, first.nbytes());
  require(static_cast<unsigned char*>(second.data())[4999] == 7, "two mappings of one file differ");
}

/// Checksums from several threads on one Workers object, of exactly sized memory: each gives the sums of a
/// single thread, and finds the first of the pages that it damages.
void shared_sums() {
  Workers shared(3, {});
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&shared, caller] {
      Workers alone(1, {});
      for (unsigned round = 0; round < kRounds; ++round) {
        std::size_t const pages = 1 + 97u * caller + 41u * round;
        std::vector<unsigned char> data(pages * kSumPage);
        std::uint32_t state = caller * 100 + round;
        for (unsigned char& byte : data)
          byte = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 24);
        std::vector<std::uint32_t> sums(pages), expected(pages);
        page_sums(alone, SumIsa::portable, data.data(), pages, expected.data());
        page_sums(shared, best_sum_isa(), data.data(), pages, sums.data());
        require(sums == expected, "sums depend on threads or the instruction set");
        require(!first_wrong_page(shared, best_sum_isa(), data.data(), pages, sums.data()),
                "a page that nobody has changed is wrong");
        std::size_t const first = pages / 3;
        for (std::size_t page = first; page < pages; page += 7) data[page * kSumPage + round] ^= 1;
        require(first_wrong_page(shared, best_sum_isa(), data.data(), pages, sums.data()) == first,
                "another page than the first changed one is wrong");
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
  shared_workers();
  shared_sums();
  exact_ends();
  short_lives();
  slabs();
  pooled();
  closed_pool();
  generations();
  boards();
  ended_generations();
  shared_slabs();
  std::puts("stress: passed");
}
