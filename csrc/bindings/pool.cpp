#include "memory/pool.hpp"

#include "bindings/abi.hpp"

using namespace ds_slide;

DS_SLIDE_ABI(std::int64_t, pool_new,
             (Pool * *made, std::uint64_t buffer_bytes, std::uint64_t count, std::int64_t pin,
              std::int64_t huge_pages)) {
  return guarded([&] { *made = new Pool(buffer_bytes, count, pin != 0, huge_pages != 0); });
}

DS_SLIDE_OWNED(pool, Pool)

/// 1, and the lease in `lent`, or 0 where no buffer is free.
DS_SLIDE_ABI(std::int64_t, pool_try_lease, (Pool * pool, Pool::Lease** lent)) {
  return guarded([&] {
    *lent = pool->try_lease().release();
    return *lent == nullptr ? 0 : 1;
  });
}

/// The addresses of all buffers, into `addresses` where there is room for `room` of them. Returns how many
/// there are.
DS_SLIDE_ABI(std::int64_t, pool_addresses, (Pool const* pool, void** addresses, std::int64_t room)) {
  return guarded([&] {
    std::int64_t count = 0;
    for (void* const address : pool->addresses()) {
      if (count < room) addresses[count] = address;
      ++count;
    }
    return count;
  });
}

DS_SLIDE_ABI(std::int64_t, pool_close, (Pool * pool)) {
  return guarded([&] { pool->close(); });
}

/// Into `values`: buffers, free, leased_peak, bytes, pinned.
DS_SLIDE_ABI(std::int64_t, pool_stats, (Pool const* pool, std::int64_t* values)) {
  return guarded([&] {
    Pool::Statistics const statistics = pool->statistics();
    values[0] = static_cast<std::int64_t>(statistics.buffers);
    values[1] = static_cast<std::int64_t>(statistics.free);
    values[2] = static_cast<std::int64_t>(statistics.leased_peak);
    values[3] = static_cast<std::int64_t>(statistics.bytes);
    values[4] = statistics.pinned ? 1 : 0;
  });
}

DS_SLIDE_ABI(void*, lease_data, (Pool::Lease const* lease)) { return lease->data(); }

DS_SLIDE_ABI(std::int64_t, lease_release, (Pool::Lease * lease)) {
  return guarded([&] { lease->release(); });
}

DS_SLIDE_OWNED(lease, Pool::Lease)
