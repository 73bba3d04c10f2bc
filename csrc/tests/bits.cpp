// Prints a hash of the results of every kernel of a built library, by its C interface. Two libraries that
// print the same compute the same bits: those of two compilers, or of two architectures, one of them under an
// emulator. Usage: bits LIBRARY [ISA]     ISA: 0 for the best one of this processor, 1 for the portable
// kernels, ...
//
// All numbers are finite: the sign and the payload of a NaN differ between architectures.
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kNumel = 3 * 16384 + 1003;  // several slices and an odd end
constexpr std::size_t kSlices = (kNumel + 16383) / 16384;

void* library;

template <class Function>
Function find(char const* name) {
  void* const found = dlsym(library, name);
  if (found == nullptr) {
    std::fprintf(stderr, "bits: %s\n", dlerror());
    std::exit(1);
  }
  return reinterpret_cast<Function>(found);
}

std::string sentence() {
  static auto const error = find<char const* (*)(std::int64_t*, char const**)>("slide_error");
  std::int64_t number = 0;
  char const* path = nullptr;
  return error(&number, &path);
}

/// Bytes at a multiple of 64, with a hash.
struct Buffer {
  explicit Buffer(std::size_t nbytes) : bytes(nbytes + 64) {}
  std::uint64_t address() { return (reinterpret_cast<std::uint64_t>(bytes.data()) + 63) / 64 * 64; }
  template <class Type>
  Type* as() {
    return reinterpret_cast<Type*>(address());
  }
  void hash(std::uint64_t& sum) {
    auto const* const data = as<unsigned char>();
    for (std::size_t i = 0; i < bytes.size() - 64; ++i) sum = (sum ^ data[i]) * 0x100000001B3u;
  }
  std::vector<unsigned char> bytes;
};

std::uint32_t random_state = 1;
std::uint32_t random_bits() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8 | random_state << 24;
}

/// A number of either sign and of many sizes; each 16th is subnormal, zero or tiny.
float number() {
  std::uint32_t const bits = random_bits();
  std::uint32_t const exponent = bits % 16 == 0 ? (bits >> 5) % 3 : 90 + (bits >> 5) % 60;
  std::uint32_t const word = (bits & 0x80000000u) | exponent << 23 | (random_bits() & 0x7FFFFFu);
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

/// `kind`: 0 bf16, 1 fp16, 2 fp32, as `dtype` in the C interface.
void fill(Buffer& buffer, int kind, bool is_positive = false) {
  for (std::size_t i = 0; i < kNumel; ++i) {
    float const value = is_positive ? std::fabs(number()) : number();
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    if (kind == 2) buffer.as<float>()[i] = value;
    if (kind == 0) buffer.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(word >> 16);
    if (kind == 1)
      buffer.as<std::uint16_t>()[i] = static_cast<std::uint16_t>((word >> 16) & 0xBBFFu);  // below 2^15
  }
}

std::vector<std::vector<std::string>> names() {
  std::vector<std::vector<std::string>> lines(1);
  lines[0].emplace_back();
  for (char const* at = find<char const* (*)()>("slide_names")(); *at != 0; ++at) {
    if (*at == '\n') {
      lines.emplace_back(1);
    } else if (*at == ' ') {
      lines.back().emplace_back();
    } else {
      lines.back().back() += *at;
    }
  }
  return lines;
}

struct Case {
  std::uint64_t rule, weight, grad, state, isa;
};

void run(void* workers, Case const& now, std::vector<std::uint64_t> const& parts, std::string const& name) {
  static auto const update =
      find<std::int64_t (*)(void*, std::uint64_t const*, std::int64_t, float const*, std::int64_t)>(
          "slide_update");
  constexpr float kNumbers[10] = {0.75f, 0.999f, 0.01f, 0.9f, 0.1f, 0.999f, 0.001f, 1.5f, 1e-3f, 1e-8f};
  // In the order of DS_SLIDE_UPDATE_RULES in csrc/update/types.hpp.
  constexpr std::size_t kStates[] = {2, 2, 1, 0, 1, 1}, kCounts[] = {10, 10, 7, 5, 5, 5};
  if (now.rule >= std::size(kStates)) {
    std::fprintf(stderr, "bits: the numbers of states of %s are not known here\n", name.c_str());
    std::exit(1);
  }
  std::size_t const states = kStates[now.rule], numbers = kCounts[now.rule];
  random_state = 1 + static_cast<std::uint32_t>(now.rule);
  Buffer weight(4 * kNumel), remainder(4 * kNumel), grad(4 * kNumel), slices(4096 * kSlices);
  Buffer new_weight(4 * kNumel), new_remainder(4 * kNumel);
  std::vector<Buffer> state(states, Buffer(4 * kNumel)), scale(states, Buffer(4 * (kNumel / 64 + 1)));
  std::vector<Buffer> new_state(states, Buffer(4 * kNumel)), low(1 + states, Buffer(kNumel));
  fill(weight, now.weight == 1 ? 2 : static_cast<int>(now.weight == 2));
  fill(remainder, now.weight == 2 ? 2 : 0);
  fill(grad, static_cast<int>(now.grad));
  for (std::size_t k = 0; k < states; ++k) {
    fill(state[k], now.state == 1 ? 0 : 2, k == 1);
    if (now.state == 2)
      for (std::size_t i = 0; i < kNumel; ++i)
        state[k].as<std::uint8_t>()[i] = static_cast<std::uint8_t>(random_bits());
    for (std::size_t i = 0; i <= kNumel / 64; ++i) scale[k].as<float>()[i] = std::fabs(number());
  }
  for (std::uint64_t const part : parts) {
    bool const logs = part == 3 || part == 4 || part == 6, elsewhere = part == 5;
    std::vector<std::uint64_t> words = {now.rule, now.weight, now.grad, now.state, part, now.isa};
    words.insert(words.end(), {kNumel, 7, 12345, 64, weight.address(), remainder.address(), grad.address()});
    words.insert(words.end(),
                 {elsewhere ? new_weight.address() : 0, elsewhere ? new_remainder.address() : 0});
    words.push_back(logs ? slices.address() : 0);
    auto const add = [&](std::vector<Buffer>& buffers, bool used) {
      words.push_back(used ? buffers.size() : 0);
      if (used)
        for (Buffer& each : buffers) words.push_back(each.address());
    };
    add(state, true);
    add(scale, now.state == 2);
    words.push_back(0);
    add(low, logs);
    add(new_state, elsewhere);
    auto const count = static_cast<std::int64_t>(words.size());
    if (update(workers, words.data(), count, kNumbers, static_cast<std::int64_t>(numbers)) < 0) {
      std::printf("%s refused: %s\n", name.c_str(), sentence().c_str());
      return;
    }
  }
  std::uint64_t sum = 0xCBF29CE484222325u;
  // Without the log: how much of it has room depends on the instruction set.
  for (Buffer* each : {&weight, &remainder, &grad, &new_weight, &new_remainder}) each->hash(sum);
  for (auto* const each : {&state, &scale, &new_state})
    for (Buffer& one : *each) one.hash(sum);
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(sum));
}

void run_others(void* workers, std::int64_t isa, std::vector<std::string> const& dtypes) {
  auto const accumulate =
      find<std::int64_t (*)(void*, std::uint64_t, std::int64_t, std::uint64_t, std::int64_t, std::int64_t,
                            std::int64_t)>("slide_accumulate");
  auto const squares =
      find<std::int64_t (*)(void*, std::uint64_t, std::int64_t, std::int64_t, std::int64_t, double*)>(
          "slide_sum_of_squares");
  auto const page_sums =
      find<std::int64_t (*)(void*, void const*, std::int64_t, std::uint32_t*, std::int64_t)>(
          "slide_page_sums");
  for (int to = 0; to < 3; ++to) {
    random_state = 1 + static_cast<std::uint32_t>(to);
    Buffer target(4 * kNumel);
    fill(target, to);
    double total = 0;
    bool good = squares(workers, target.address(), to, kNumel, isa, &total) == 0;
    for (int from = 0; from < 3; ++from) {
      Buffer source(4 * kNumel);
      fill(source, from);
      good &= accumulate(workers, target.address(), to, source.address(), from, kNumel, isa) == 0;
    }
    std::uint32_t sums[4] = {};
    good &= page_sums(workers, target.as<void>(), 4 * 4096, sums, 0) == 0;
    std::uint64_t sum = 0xCBF29CE484222325u;
    target.hash(sum);
    std::printf("%s %016llx, squares %a, sums %08x %08x%s\n",
                dtypes[1 + static_cast<std::size_t>(to)].c_str(), static_cast<unsigned long long>(sum), total,
                sums[0], sums[3], good ? "" : " FAILED");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2 || (library = dlopen(arguments[1], RTLD_NOW)) == nullptr) {
    std::fprintf(stderr, "bits: %s\n", count < 2 ? "name a library" : dlerror());
    return 1;
  }
  std::uint64_t const isa = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
  void* workers = nullptr;
  auto const make =
      find<std::int64_t (*)(void**, std::int64_t, std::int64_t const*, std::int64_t)>("slide_workers_new");
  if (make(&workers, 2, nullptr, 0) < 0) {
    std::fprintf(stderr, "bits: %s\n", sentence().c_str());
    return 1;
  }
  auto const all = names();  // lines: rule, weight_format, state_format, dtype, part, isa
  // A whole step; in two passes; with a log; with a log and taken back; out of place.
  std::vector<std::vector<std::uint64_t>> const steps = {{0}, {1, 2}, {3, 6}, {3, 4}, {5}};
  for (std::uint64_t rule = 0; rule + 1 < all[0].size(); ++rule)
    for (std::uint64_t weight = 0; weight < 3; ++weight)
      for (std::uint64_t grad = 0; grad < 3; ++grad)
        for (std::uint64_t state = 0; state < 3; ++state)
          for (auto const& parts : steps) {
            std::string name;
            for (auto const& each :
                 {all[0][1 + rule], all[1][1 + weight], all[3][1 + grad], all[2][1 + state]})
              name += each + " ";
            for (std::uint64_t const part : parts) name += all[4][1 + part] + " ";
            run(workers, {rule, weight, grad, state, isa}, parts, name);
          }
  run_others(workers, static_cast<std::int64_t>(isa), all[3]);
  return 0;
}
