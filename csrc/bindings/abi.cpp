#include "bindings/abi.hpp"

#include <dlfcn.h>

#include <new>
#include <stdexcept>

#include "io/file.hpp"

namespace ds_slide {
namespace {

struct Kept {
  std::string sentence, path;
  std::int64_t number = 0;  // an errno
};

Kept& kept() {
  thread_local Kept error;
  return error;
}

std::int64_t keep(Failure failure, char const* sentence, int number = 0, std::string const& path = {}) {
  kept() = {sentence, path, number};
  return -static_cast<std::int64_t>(failure);
}

std::string& functions() {
  static std::string text;
  return text;
}

}  // namespace

std::int64_t keep_exception() noexcept try {
  try {
    throw;
  } catch (FileError const& error) {
    return keep(Failure::file, error.what(), error.error, error.path);
  } catch (std::invalid_argument const& error) {
    return keep(Failure::value, error.what());
  } catch (std::length_error const& error) {
    return keep(Failure::value, error.what());
  } catch (std::out_of_range const& error) {
    return keep(Failure::index, error.what());
  } catch (std::bad_alloc const& error) {
    return keep(Failure::memory, error.what());
  } catch (std::exception const& error) {
    return keep(Failure::runtime, error.what());
  } catch (...) {
    return keep(Failure::runtime, "an exception of an unknown type");
  }
} catch (...) {  // there is no memory for the sentence
  return -static_cast<std::int64_t>(Failure::memory);
}

void** cell_of(void* capsule) noexcept {
  // The library is not linked to Python: it is called from a process that has these functions.
  using GetPointer = void* (*)(void*, char const*);
  static GetPointer const get = reinterpret_cast<GetPointer>(dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer"));
  return static_cast<void**>(get(capsule, nullptr));
}

void keep_sentence(std::string const& sentence) { kept() = {sentence, {}, 0}; }

std::size_t count_of(char const* argument, std::int64_t value) {
  if (value < 0)
    throw std::invalid_argument(std::string(argument) + " is " + std::to_string(value) +
                                " but must not be negative");
  return static_cast<std::size_t>(value);
}

void* pointer(char const* argument, std::uint64_t address, std::size_t element_size, std::size_t numel) {
  if (numel > 0 && (address == 0 || address % element_size != 0)) {
    throw std::invalid_argument(std::string(argument) + " is " + std::to_string(address) +
                                ", which is not the address of " + std::to_string(element_size) +
                                "-byte elements");
  }
  return reinterpret_cast<void*>(address);
}

Exported::Exported(char const* name, std::string const& types) {
  functions() += std::string(name) + " " + types + "\n";
}

}  // namespace ds_slide

/// One line for each function: its name without the prefix, and its types.
extern "C" __attribute__((visibility("default"))) char const* slide_functions() {
  return ds_slide::functions().c_str();
}

/// A cell for a pointer to an object of C++, which is null. Null where there is no memory.
DS_SLIDE_ABI(void*, cell_new, ()) { return std::calloc(1, sizeof(void*)); }

/// The sentence of the last call of this thread that failed, with its errno and its path where it has them.
DS_SLIDE_ABI(char const*, error, (std::int64_t* number, char const** path)) {
  ds_slide::Kept const& error = ds_slide::kept();
  *number = error.number;
  *path = error.path.c_str();
  return error.sentence.c_str();
}
