#include "io/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "io/backend.hpp"

namespace ds_slide {
namespace {

template <class Call>
auto without_interruption(Call const& call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

}  // namespace

File::File(std::string path, std::int64_t nbytes, std::optional<int> descriptor) : _path(std::move(path)) {
  if (nbytes < 0)
    throw std::invalid_argument("nbytes is " + std::to_string(nbytes) + " but must not be negative");
  bool const is_new = nbytes > 0;
  if (descriptor) {
    _fd = without_interruption([&] { return ::fcntl(*descriptor, F_DUPFD_CLOEXEC, 0); });
  } else {
    int const flags = O_RDWR | O_CLOEXEC | (is_new ? O_CREAT | O_EXCL : 0);
    _fd = without_interruption([&] { return ::open(_path.c_str(), flags, 0600); });
  }
  if (_fd < 0) fail(errno, std::string(is_new ? "the file cannot be made: " : "the file cannot be opened: "));
  try {
    if (is_new) allocate(nbytes);
    _direct = try_direct(is_new);
  } catch (...) {
    if (is_new && !descriptor) ::unlink(_path.c_str());
    ::close(_fd);
    throw;
  }
}

File::~File() { ::close(_fd); }

void File::fail(int error, std::string const& sentence) const {
  throw FileError(error, _path, sentence + errno_text(error));
}

std::int64_t File::size() const {
  struct stat status{};
  if (::fstat(_fd, &status) != 0) fail(errno, "the length of the file cannot be read: ");
  return status.st_size;
}

void File::sync() const {
  if (without_interruption([&] { return ::fdatasync(_fd); }) != 0) {
    fail(errno, "what was written to the file may not be on the device, its data must be taken as lost: ");
  }
}

void File::allocate(std::int64_t nbytes) const {
  struct statvfs space{};
  if (::fstatvfs(_fd, &space) != 0) fail(errno, "the free space beside the file cannot be read: ");
  auto const available =
      static_cast<std::int64_t>(space.f_bavail) * static_cast<std::int64_t>(space.f_frsize);
  std::string const need = "the file needs " + std::to_string(nbytes) + " bytes";
  std::string const beside = need + " and its filesystem has " + std::to_string(available) + " free: ";
  // The check comes first because fallocate fills the disk for all users before it gives up.
  if (available < nbytes) fail(ENOSPC, beside);
  auto const no_space = [&](int error) {  // a limit on the length of files has nothing to do with free space
    fail(error, error == EFBIG ? need + ": " : beside);
  };
  if (without_interruption([&] { return ::fallocate(_fd, 0, 0, nbytes); }) == 0) return;
  int const error = errno;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) no_space(error);
  if (error != EOPNOTSUPP && error != ENOSYS) fail(error, "space for the file cannot be allocated: ");
  if (without_interruption([&] { return ::ftruncate(_fd, nbytes); }) != 0) no_space(errno);
}

bool File::try_direct(bool is_new) const {
  // fcntl and not a second open: the same inode for certain, and a filesystem that refuses leaves a working
  // file.
  int const flags = ::fcntl(_fd, F_GETFL);
  if (flags < 0 || ::fcntl(_fd, F_SETFL, flags | O_DIRECT) != 0) return false;
  // Some take the flag and refuse the transfer, others want more than 4096-byte alignment, so one block is
  // moved: to an address that is a multiple of 4096 but of nothing larger. A new file holds zeros, writing
  // them changes nothing.
  std::unique_ptr<void, void (*)(void*)> const memory(std::aligned_alloc(2 * kBlock, 2 * kBlock), std::free);
  if (memory == nullptr) throw std::bad_alloc();
  char* const block = static_cast<char*>(memory.get()) + kBlock;
  std::memset(block, 0, kBlock);
  bool works = without_interruption([&] { return ::pread(_fd, block, kBlock, 0); }) >= 0;
  if (works && is_new && size() >= kBlock) {
    std::memset(block, 0, kBlock);
    works = without_interruption([&] { return ::pwrite(_fd, block, kBlock, 0); }) >= 0;
  }
  if (!works && ::fcntl(_fd, F_SETFL, flags) != 0) fail(errno, "O_DIRECT cannot be taken back: ");
  return works;
}

}  // namespace ds_slide
