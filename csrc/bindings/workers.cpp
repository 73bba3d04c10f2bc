#include "threads/workers.hpp"

#include <vector>

#include "bindings/abi.hpp"

using ds_slide::guarded;
using ds_slide::Workers;

DS_SLIDE_ABI(std::int64_t, workers_new,
             (Workers * *made, std::int64_t num_threads, std::int64_t const* cores, std::int64_t num_cores)) {
  return guarded([&] {
    std::vector<int> const chosen(cores, cores + num_cores);
    *made = new Workers(static_cast<int>(num_threads), chosen);
  });
}

DS_SLIDE_OWNED(workers, Workers)

DS_SLIDE_ABI(std::int64_t, workers_num_threads, (Workers const* workers)) { return workers->num_threads(); }
