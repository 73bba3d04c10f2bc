#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

namespace ds_slide {

/// Unit of every offset, address and length: no block device asks for more.
constexpr std::int64_t kBlock = 4096;

/// A system call on a file failed. what() is a sentence with the path.
struct FileError : std::runtime_error {
  FileError(int error_number, std::string path_, std::string const& sentence)
      : std::runtime_error(sentence), error(error_number), path(std::move(path_)) {}
  int error;
  std::string path;
};

/// An open file, with O_DIRECT where its filesystem takes it. Immutable but for `slot`; closed by the
/// destructor.
class File {
 public:
  /// Makes a new file of `nbytes` bytes (mode 0600) with all its space allocated, or with nbytes = 0 opens an
  /// existing one. Throws FileError, leaving no file behind that it made.
  /// With `descriptor` nothing is opened by name: it is open on the file for reading and writing, the file is
  /// empty if nbytes > 0, and `path` only names it in errors. The caller keeps the descriptor, which gets
  /// O_DIRECT as well. Closing it does not close this file.
  File(std::string path, std::int64_t nbytes, std::optional<int> descriptor = std::nullopt);
  ~File();
  File(File const&) = delete;
  File& operator=(File const&) = delete;

  [[nodiscard]] int fd() const noexcept { return _fd; }
  [[nodiscard]] bool direct() const noexcept { return _direct; }
  [[nodiscard]] std::string const& path() const noexcept { return _path; }

  /// Length in bytes now. Throws FileError.
  [[nodiscard]] std::int64_t size() const;
  /// Waits until what was written is on the device. Throws FileError.
  void sync() const;

  /// The number of the file where the backend has registered it, else -1. Set before the first request.
  int slot = -1;

 private:
  void allocate(std::int64_t nbytes) const;
  [[nodiscard]] bool try_direct(bool is_new) const;
  [[noreturn]] void fail(int error, std::string const& sentence) const;

  std::string _path;
  int _fd = -1;
  bool _direct = false;
};

}  // namespace ds_slide
