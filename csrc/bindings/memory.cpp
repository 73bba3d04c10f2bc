#include <stdexcept>

#include "bindings/abi.hpp"
#include "memory/generations.hpp"
#include "memory/slab.hpp"

using namespace ds_slide;

/// `place`: null for memory of its own, else the descriptor of a memory file and an offset in it. `nbytes` is
/// a size_t.
DS_SLIDE_ABI(std::int64_t, slab_new,
             (Slab * *made, std::uint64_t nbytes, std::int64_t pin, std::int64_t huge_pages,
              std::int64_t const* place)) {
  return guarded([&] {
    *made = place == nullptr ? new Slab(nbytes, pin != 0, huge_pages != 0)
                             : new Slab(static_cast<int>(place[0]), count_of("offset", place[1]), nbytes,
                                        pin != 0, huge_pages != 0);
  });
}

DS_SLIDE_OWNED(slab, Slab)

DS_SLIDE_ABI(std::int64_t, slab_close, (Slab * slab)) {
  return guarded([&] { slab->close(); });
}

DS_SLIDE_ABI(void*, slab_data, (Slab const* slab)) { return slab->data(); }

DS_SLIDE_ABI(std::int64_t, slab_pinned, (Slab const* slab)) { return slab->pinned() ? 1 : 0; }

DS_SLIDE_ABI(std::int64_t, generations_bytes, (std::int64_t count)) {
  return guarded([&] { return Generations::bytes(count_of("count", count)); });
}

DS_SLIDE_ABI(std::int64_t, generations_new,
             (Generations * *made, void* memory, std::uint64_t nbytes, std::int64_t count)) {
  return guarded([&] {
    if (memory == nullptr || nbytes < Generations::bytes(count_of("count", count)))
      throw std::invalid_argument("this Slab is too small for so many counters");
    *made = new Generations(memory, static_cast<std::size_t>(count));
  });
}

DS_SLIDE_OWNED(generations, Generations)

DS_SLIDE_ABI(std::int64_t, generations_publish,
             (Generations * generations, std::uint64_t index, std::int64_t value)) {
  return guarded([&] { generations->publish(index, static_cast<std::uint32_t>(value)); });
}

DS_SLIDE_ABI(std::int64_t, generations_store,
             (Generations * generations, std::uint64_t index, std::int64_t value)) {
  return guarded([&] { generations->store(index, static_cast<std::uint32_t>(value)); });
}

DS_SLIDE_ABI(std::int64_t, generations_close, (Generations * generations)) {
  return guarded([&] { generations->close(); });
}

DS_SLIDE_ABI(std::int64_t, generations_value, (Generations const* generations, std::uint64_t index)) {
  return guarded([&] { return generations->value(index); });
}

DS_SLIDE_ABI(std::int64_t, generations_closed, (Generations const* generations)) {
  return generations->closed() ? 1 : 0;
}

/// The number of a Generations::Outcome.
DS_SLIDE_ABI(std::int64_t, generations_wait,
             (Generations * generations, std::uint64_t index, std::int64_t at_least)) {
  return guarded([&] {
    return static_cast<std::int64_t>(generations->wait(index, static_cast<std::uint32_t>(at_least)));
  });
}

DS_SLIDE_ABI(std::int64_t, generations_interrupt, (Generations * generations)) {
  return guarded([&] { generations->interrupt(); });
}

DS_SLIDE_ABI(std::int64_t, generations_changes, (Generations const* generations)) {
  return generations->changes();
}

DS_SLIDE_ABI(std::int64_t, generations_wait_change, (Generations * generations, std::int64_t seen)) {
  return guarded([&] { generations->wait_change(static_cast<std::uint32_t>(seen)); });
}

DS_SLIDE_ABI(std::int64_t, generations_poke, (Generations * generations)) {
  return guarded([&] { generations->poke(); });
}
