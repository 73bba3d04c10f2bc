// The C interface of the library: what ds_slide/_native calls through ctypes.
//
// A function takes and returns pointers, 64-bit integers and doubles only, so that Python can check at load
// what each of them takes (signatures.cpp). Most return a number that is not negative, or minus a `Failure`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <type_traits>

namespace ds_slide {

/// What Python raises for the exception that ended a call: ValueError, IndexError, MemoryError, RuntimeError,
/// OSError.
enum class Failure : std::int64_t { value = 1, index, memory, runtime, file };

/// Keeps the exception under way for `slide_error` of this thread, and returns what the call returns.
std::int64_t keep_exception() noexcept;
/// Keeps a sentence alone.
void keep_sentence(std::string const& sentence);

/// Runs `call`, which returns nothing or a number that is not negative.
template <class Call>
std::int64_t guarded(Call const& call) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
      return 0;
    } else {
      return static_cast<std::int64_t>(call());
    }
  } catch (...) {
    return keep_exception();
  }
}

/// A count or a size that came as a signed number. Throws std::invalid_argument for a negative one.
std::size_t count_of(char const* argument, std::int64_t value);

/// The address as a pointer, checked as far as an address can be.
void* pointer(char const* argument, std::uint64_t address, std::size_t element_size, std::size_t numel);

/// The cell of a capsule of Python: memory of the C heap that holds a pointer to an object of C++, or null.
void** cell_of(void* capsule) noexcept;

/// Deletes the object and its cell. Python calls it when the last reference to the capsule is gone, with the
/// GIL.
template <class Type>
void drop(void* capsule) noexcept {
  void** const cell = cell_of(capsule);
  delete static_cast<Type*>(*cell);
  std::free(cell);
}

/// Adds a function's name and types to what `slide_functions` tells: the result's letter, then the
/// arguments'.
struct Exported {
  template <class Result, class... Arguments>
  Exported(char const* name, Result (*)(Arguments...)) : Exported(name, {code<Result>, code<Arguments>...}) {}
  Exported(char const* name, std::string const& types);

 private:
  template <class Type>
  static constexpr char code = std::is_pointer_v<Type>                         ? 'p'
                               : std::is_same_v<Type, double>                  ? 'd'
                               : std::is_integral_v<Type> && sizeof(Type) == 8 ? 'q'
                                                                               : '?';
};

}  // namespace ds_slide

/// Defines a function of the interface: DS_SLIDE_ABI(int64_t, name, (arguments)) { body }
#define DS_SLIDE_ABI(result, name, arguments)                                      \
  extern "C" __attribute__((visibility("default"))) result slide_##name arguments; \
  static ::ds_slide::Exported const exported_##name{#name, &slide_##name};         \
  extern "C" __attribute__((visibility("default"))) result slide_##name arguments

/// Defines slide_`name`_drop, the destructor of the capsules that own objects of `Type`.
#define DS_SLIDE_OWNED(name, Type)                                                            \
  extern "C" __attribute__((visibility("default"))) void slide_##name##_drop(void* capsule) { \
    ::ds_slide::drop<Type>(capsule);                                                          \
  }
