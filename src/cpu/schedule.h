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

// How the heads of a call are cut into items of work. Never changes a result.
struct Shares {
  int heads = 1;  // of one item: neighbours, which then share memory pages
  int parts = 1;  // into which each head's column panels are cut
};

// Items as large as leave the threads busy to the end; when even single heads are too few, parts of
// heads, as many as end first. (Every part repeats the work that does not depend on the column.)
// `lengths`: tokens of each sequence, longest first; every sequence has `heads` heads of `panels`
// column panels; an item has at most `most_heads` heads.
Shares share(std::span<const std::int64_t> lengths, std::int64_t heads, int panels, int most_heads,
             int threads);

}  // namespace flash_kda::cpu
