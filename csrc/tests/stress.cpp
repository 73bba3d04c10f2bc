// Hammers the threads, the kernels and the slabs from several callers at once. Built with a sanitizer by
// run_sanitizers.sh: a race, an overrun or undefined behaviour ends it with a report, a wrong bit with
// status 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

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

/// The planes of one update in exactly sized allocations, so that an overrun leaves them. Room for 4-byte
/// elements.
struct Planes {
  explicit Planes(std::size_t numel, unsigned seed)
      : numel(numel), words(5, std::vector<std::uint32_t>(numel)) {
    std::uint32_t state = seed * 2654435761u + 1;
    for (auto& plane : words) {
      for (std::uint32_t& word : plane) {
        state = state * 1664525u + 1013904223u;
        word = (state & 0x83FF83FFu) | 0x3C003C00u;  // ordinary numbers of either sign, also as fp16 and bf16
      }
    }
    for (std::uint32_t& word : words[3]) word &= 0x7FFFFFFFu;  // exp_avg_sq is not negative
  }
  AdamwArrays arrays() {
    return {words[0].data(), words[1].data(), reinterpret_cast<float*>(words[2].data()),
            reinterpret_cast<float*>(words[3].data()), words[4].data()};
  }
  std::size_t numel;
  std::vector<std::vector<std::uint32_t>> words;
};

KernelTable const& kernels_for(unsigned index) {
  return kernels_of(static_cast<Isa>(index % (1 + static_cast<unsigned>(best_isa()))));
}

/// Calls from several threads on one Workers object; every result equals that of a single thread.
void shared_workers() {
  Workers shared(3, {});
  AdamwConstants const constants = make_constants({1e-3, 0.9, 0.95, 1e-8, 0.1, 3, true, true, 0.5});
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&shared, &constants, caller] {
      Workers alone(1, {});
      for (unsigned round = 0; round < kRounds; ++round) {
        std::size_t const numel = 40000u + 7919u * caller + round;
        auto const format = static_cast<WeightFormat>((caller + round) % kNumWeightFormats);
        auto const dtype = static_cast<Dtype>(round % kNumDtypes);
        Planes actual(numel, caller * 100 + round);
        Planes expected = actual;
        adamw(shared, kernels_for(round), format, dtype, actual.arrays(), numel, constants);
        adamw(alone, portable_kernels(), format, dtype, expected.arrays(), numel, constants);
        require(actual.words == expected.words, "an update differs");

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

/// 16-bit planes at the very end of their allocations, every length of the last vector.
void exact_ends() {
  Workers workers(2, {});
  AdamwConstants const constants = make_constants({1e-3, 0.9, 0.95, 1e-8, 0.1, 3, true, false, 1.0});
  for (unsigned isa = 0; isa < 3; ++isa) {
    for (std::size_t numel = 0; numel < 70; ++numel) {
      std::vector<std::uint16_t> weight(numel, 0x3F80), remainder(numel, 0x0123), grad(numel, 0x3F00);
      std::vector<float> exp_avg(numel, 0.5f), exp_avg_sq(numel, 0.25f);
      adamw(workers, kernels_for(isa), WeightFormat::bf16_planar, Dtype::bf16,
            {weight.data(), remainder.data(), exp_avg.data(), exp_avg_sq.data(), grad.data()}, numel,
            constants);
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

}  // namespace

int main() {
  shared_workers();
  exact_ends();
  short_lives();
  slabs();
  std::puts("stress: passed");
}
