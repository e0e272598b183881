// Sharing work out over threads.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace flash_kda::cpu {

// Calls work(item, worker) once for each item in [0, items), in that order of starting, on at most
// `threads` threads, the caller's among them; worker < threads. Goes on with fewer if the system
// gives no more. `work` must not throw.
void parallel_for(std::int64_t items, int threads,
                  const std::function<void(std::int64_t item, int worker)>& work);

// Into how many parts to cut each head's `panels` column panels: the number that ends first on
// `threads` threads. 1 if there are items enough, since every part repeats the work that does not
// depend on the column. `lengths`: tokens of each sequence, longest first; every sequence has
// `heads` heads.
int column_parts(std::span<const std::int64_t> lengths, std::int64_t heads, int panels,
                 int threads);

}  // namespace flash_kda::cpu
