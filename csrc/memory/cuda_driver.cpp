#include "memory/cuda_driver.hpp"

#include <dlfcn.h>
#include <sys/resource.h>

#include <stdexcept>
#include <string>

namespace ds_slide::cuda_driver {
namespace {

// Declared here rather than taken from cuda.h, which a build machine need not have. These are part of the
// driver's stable ABI.
using Result = int;
using Device = int;
constexpr Result kSuccess = 0;
constexpr unsigned kRegisterPortable = 0x01;  // CU_MEMHOSTREGISTER_PORTABLE

struct Driver {
  Result (*init)(unsigned);
  Result (*get_error_name)(Result, char const**);
  Result (*context_get_current)(Context*);
  Result (*context_push)(Context);
  Result (*context_pop)(Context*);
  Result (*device_get)(Device*, int);
  Result (*primary_context_retain)(Context*, Device);
  Result (*host_register)(void*, std::size_t, unsigned);
  Result (*host_unregister)(void*);
  std::string unavailable;  // why the driver cannot be used; empty when it can
};

template <class Function>
void find(void* library, char const* name, Function& function, std::string& unavailable) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) unavailable = std::string("the CUDA driver lacks ") + name;
}

std::string describe(Driver const& driver, Result result) {
  char const* name = nullptr;
  if (driver.get_error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  return std::string(name) + " (" + std::to_string(result) + ")";
}

Driver load() {
  Driver driver{};
  void* const library =
      dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed: the driver is not unloadable
  if (library == nullptr) {
    driver.unavailable = std::string("the CUDA driver could not be opened: ") + dlerror();
    return driver;
  }
  find(library, "cuInit", driver.init, driver.unavailable);
  find(library, "cuGetErrorName", driver.get_error_name, driver.unavailable);
  find(library, "cuCtxGetCurrent", driver.context_get_current, driver.unavailable);
  find(library, "cuCtxPushCurrent_v2", driver.context_push, driver.unavailable);
  find(library, "cuCtxPopCurrent_v2", driver.context_pop, driver.unavailable);
  find(library, "cuDeviceGet", driver.device_get, driver.unavailable);
  find(library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain, driver.unavailable);
  find(library, "cuMemHostRegister_v2", driver.host_register, driver.unavailable);
  find(library, "cuMemHostUnregister", driver.host_unregister, driver.unavailable);
  if (!driver.unavailable.empty()) return driver;
  if (Result const result = driver.init(0); result != kSuccess) {
    driver.unavailable = "cuInit failed with " + describe(driver, result);
  }
  return driver;
}

Driver const& instance() {
  static Driver const driver = load();
  return driver;
}

Context primary_context(Driver const& driver) {
  // Retained once and kept: pinned slabs live about as long as the process.
  static Context const context = [&driver] {
    Device device = 0;
    Context primary = nullptr;
    Result result = driver.device_get(&device, 0);
    if (result == kSuccess) result = driver.primary_context_retain(&primary, device);
    if (result != kSuccess) {
      throw std::runtime_error("no CUDA context is current and that of device 0 could not be made: " +
                               describe(driver, result));
    }
    return primary;
  }();
  return context;
}

std::string memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

}  // namespace

Context register_host(void* address, std::size_t nbytes) {
  std::string const what = "cannot page-lock " + std::to_string(nbytes) + " bytes of host memory: ";
  Driver const& driver = instance();
  if (!driver.unavailable.empty()) {
    throw std::runtime_error(what + driver.unavailable +
                             "; pinned memory needs an NVIDIA driver, use pin=False here");
  }
  Context context = nullptr;
  if (driver.context_get_current(&context) != kSuccess || context == nullptr) {
    try {
      context = primary_context(driver);
    } catch (std::runtime_error const& error) {
      throw std::runtime_error(what + error.what());
    }
  }
  Result result = driver.context_push(context);
  if (result == kSuccess) {
    result = driver.host_register(address, nbytes, kRegisterPortable);
    driver.context_pop(&context);
  }
  if (result != kSuccess) {
    throw std::runtime_error(
        what + "cuMemHostRegister failed with " + describe(driver, result) +
        "; free host memory or lower the host memory budget, and raise the locked-memory limit "
        "(`ulimit -l`, now " +
        memlock_limit() + ") or that of the container");
  }
  return context;
}

void unregister_host(void* address, Context context) noexcept {
  Driver const& driver = instance();
  if (!driver.unavailable.empty() || driver.context_push(context) != kSuccess) return;
  driver.host_unregister(address);
  driver.context_pop(&context);
}

}  // namespace ds_slide::cuda_driver
