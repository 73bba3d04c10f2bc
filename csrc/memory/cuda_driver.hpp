#pragma once

#include <cstddef>
#include <string>

namespace ds_slide {

/// The three things that host memory needs of the CUDA driver, which is opened at run time: the extension
/// builds and loads on machines without CUDA.
namespace cuda_driver {

using Context = void*;

/// Page-locks [address, address + nbytes) for every context ("portable"). Uses the calling thread's current
/// context, or the primary context of device 0 when there is none. Returns the context that was used.
/// Throws std::runtime_error whose text says what the driver refused and what to do.
Context register_host(void* address, std::size_t nbytes);

/// Undoes register_host. Errors are ignored: at process exit the driver may be gone already, and with it the
/// lock.
void unregister_host(void* address, Context context) noexcept;

}  // namespace cuda_driver
}  // namespace ds_slide
