#include "emulation/warpgroup_products.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "emulation/fragments.h"

namespace flash_kda::emulation {

namespace {

// What accumulators hold while a product is in flight: a NaN that arithmetic does not make.
constexpr std::uint32_t kPoison = 0x7fc0dead;

// The fields of a matrix descriptor.
SharedAddress start_address(std::uint64_t d) { return static_cast<SharedAddress>(d & 0x3fff) << 4; }
SharedAddress leading_bytes(std::uint64_t d) {
  return static_cast<SharedAddress>((d >> 16) & 0x3fff) << 4;
}
SharedAddress stride_bytes(std::uint64_t d) {
  return static_cast<SharedAddress>((d >> 32) & 0x3fff) << 4;
}
constexpr std::uint64_t kDescriptorFields =
    0x3fffull | (0x3fffull << 16) | (0x3fffull << 32) | (3ull << 62);
constexpr std::uint64_t kSwizzle128 = 1;

template <int kColumns, int kStride>
void multiply(const float (&a)[16][16], const float (&b)[16][kStride], float (&c)[16][kStride]) {
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < kColumns; ++n) c[i][n] += a[i][k] * b[k][n];
    }
  }
}

}  // namespace

WarpgroupProducts::WarpgroupProducts(Scheduler& scheduler, Clocks& clocks, SharedMemory& memory)
    : scheduler_(scheduler),
      clocks_(clocks),
      memory_(memory),
      warps_(static_cast<std::size_t>(scheduler.warps())),
      programs_(static_cast<std::size_t>(scheduler.warps() / kWarpgroupWarps)),
      program_starts_(programs_.size()) {}

WarpgroupProducts::WarpState& WarpgroupProducts::current_warp() {
  return warps_[static_cast<std::size_t>(scheduler_.current().warp())];
}

// Calls f(address of 16 bytes of B, first k, first n) for chunks of 8 elements along k or along n.
template <class Function>
void WarpgroupProducts::for_each_chunk(const Product& product, Function f) {
  const SharedAddress start = start_address(product.descriptor);
  const SharedAddress leading = leading_bytes(product.descriptor);
  const SharedAddress stride = stride_bytes(product.descriptor);
  const auto row_bytes = [&](int row) {
    return static_cast<SharedAddress>(row / 8) * stride +
           static_cast<SharedAddress>(row % 8 * kSwizzleRowBytes);
  };
  if (product.major == Major::kK) {
    for (int n = 0; n < product.columns; ++n) {
      for (int k = 0; k < kInner; k += 8) {
        f(swizzle(start + row_bytes(n) + static_cast<SharedAddress>(2 * k)), k, n);
      }
    }
  } else {
    for (int k = 0; k < kInner; ++k) {
      for (int n = 0; n < product.columns; n += 8) {
        const SharedAddress column =
            static_cast<SharedAddress>(n / 64) * leading + static_cast<SharedAddress>(n % 64 * 2);
        f(swizzle(start + row_bytes(k) + column), k, n);
      }
    }
  }
}

void WarpgroupProducts::check_descriptor(const Product& product) const {
  const std::uint64_t d = product.descriptor;
  const auto bad = [&](const char* why) {
    scheduler_.fail(format("%s: descriptor 0x%016llx: %s", product.operation,
                           static_cast<unsigned long long>(d), why));
  };
  if ((d & ~kDescriptorFields) != 0) bad("bits outside the fields are set");
  if (d >> 62 != kSwizzle128) bad("expected 128-byte swizzle (1 in bits 62-63)");
  const SharedAddress in_pattern = start_address(d) % kSwizzlePatternBytes;
  if (product.major == Major::kK) {
    // 16 elements at a multiple of 32 bytes inside the pattern's first row.
    if (in_pattern % (2 * kInner) != 0 || in_pattern >= kSwizzleRowBytes) {
      bad("expected a start at 0, 32, 64 or 96 bytes past a multiple of 1024");
    }
  } else if (in_pattern != 0) {
    bad("expected a start at a multiple of 1024 bytes");
  }
}

// Every warp of a warpgroup must do the same, in the same order.
void WarpgroupProducts::follow(const Step& step) {
  const auto warpgroup = static_cast<std::size_t>(scheduler_.current().warp() / kWarpgroupWarps);
  if (warpgroup >= programs_.size()) {
    scheduler_.fail(format("%s: the block has no four warps for this warpgroup", step.operation));
  }
  std::deque<Step>& program = programs_[warpgroup];
  WarpState& warp = current_warp();
  const std::size_t position = warp.steps++ - program_starts_[warpgroup];
  if (position == program.size()) {
    program.push_back(step);
  } else {
    const Step& other = program[position];
    if (std::strcmp(other.operation, step.operation) != 0 || other.descriptor != step.descriptor ||
        other.accumulate != step.accumulate || other.pending != step.pending) {
      scheduler_.fail(
          format("%s (descriptor 0x%016llx, accumulate %d, pending %d), where another warp of the "
                 "warpgroup did %s (descriptor 0x%016llx, accumulate %d, pending %d)",
                 step.operation, static_cast<unsigned long long>(step.descriptor), step.accumulate,
                 step.pending, other.operation, static_cast<unsigned long long>(other.descriptor),
                 other.accumulate, other.pending));
    }
  }
  std::size_t least = warp.steps;
  for (std::size_t w = 0; w < kWarpgroupWarps; ++w) {
    least = std::min(least, warps_[warpgroup * kWarpgroupWarps + w].steps);
  }
  for (; program_starts_[warpgroup] < least; ++program_starts_[warpgroup]) program.pop_front();
}

void WarpgroupProducts::issue(const char* operation, float* d, int columns, const std::uint32_t* a,
                              std::uint64_t descriptor, Major major, bool accumulate) {
  Arguments mine{d, a, descriptor, accumulate};
  scheduler_.gather(operation, mine, [&](Arguments* const(&lanes)[kWarpSize]) {
    WarpState& warp = current_warp();
    Product& product = warp.products.emplace_back();
    product.operation = operation;
    product.descriptor = descriptor;
    product.columns = columns;
    product.major = major;
    issue_warp(product, lanes);
    warp.open += 1;
  });
  scheduler_.maybe_preempt();
}

void WarpgroupProducts::issue_warp(Product& product, Arguments* const (&lanes)[kWarpSize]) {
  WarpState& warp = current_warp();
  const bool accumulate = lanes[0]->accumulate;
  for (const Arguments* lane : lanes) {
    if (lane->descriptor != product.descriptor || lane->accumulate != accumulate) {
      scheduler_.fail(
          format("%s: descriptor or accumulate differ within the warp", product.operation));
    }
  }
  follow({product.operation, product.descriptor, accumulate, 0});
  check_descriptor(product);
  if (!warp.fenced) {
    scheduler_.fail(format("%s: no wgmma_fence since the last wgmma_wait", product.operation));
  }
  float a[16][16], b[16][kMaxColumns];
  for (int lane = 0; lane < kWarpSize; ++lane) unpack_a(lanes[lane]->a, lane, a);
  const Clocks::Knowledge& by = clocks_.of_warp(scheduler_.current().warp());
  std::uint16_t* raw = product.b;
  for_each_chunk(product, [&](SharedAddress address, int k, int n) {
    memory_.start_read(product.operation, by, address, raw, kChunkBytes);
    for (int i = 0; i < 8; ++i) {
      float& to = product.major == Major::kK ? b[k + i][n] : b[k][n + i];
      to = from_bf16(raw[i]);
    }
    raw += 8;
  });
  Accumulator& acc = accumulator(warp, product.operation, product.columns, accumulate, lanes);
  product.accumulator = &acc;
  if (!accumulate) std::memset(acc.values, 0, sizeof acc.values);
  switch (product.columns) {
    case 32:
      return multiply<32>(a, b, acc.values);
    case 64:
      return multiply<64>(a, b, acc.values);
    case 128:
      return multiply<128>(a, b, acc.values);
    default:
      throw std::logic_error("columns");
  }
}

WarpgroupProducts::Accumulator& WarpgroupProducts::accumulator(
    WarpState& warp, const char* operation, int columns, bool accumulate,
    Arguments* const (&lanes)[kWarpSize]) {
  const int size = columns / 2;  // floats a lane
  for (Accumulator& other : warp.accumulators) {
    bool same = other.columns == columns, apart = true;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      same = same && other.lanes[lane] == lanes[lane]->d;
      apart = apart && (lanes[lane]->d + size <= other.lanes[lane] ||
                        other.lanes[lane] + other.columns / 2 <= lanes[lane]->d);
    }
    if (same) {
      other.products += 1;
      return other;
    }
    if (!apart) {
      scheduler_.fail(format("%s: the accumulators overlap others in flight in part", operation));
    }
  }
  Accumulator& acc = warp.accumulators.emplace_back();
  acc.columns = columns;
  acc.products = 1;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* d = lanes[lane]->d;
    acc.lanes[lane] = d;
    for (int i = 0; i < size; ++i) {
      const int row = fragment_group(lane) + 8 * (i / 2 % 2),
                column = 8 * (i / 4) + 2 * fragment_in_group(lane) + i % 2;
      if (accumulate) acc.values[row][column] = d[i];
      d[i] = std::bit_cast<float>(kPoison);
    }
  }
  return acc;
}

void WarpgroupProducts::fence() {
  struct {
  } mine;
  scheduler_.gather("wgmma_fence", mine, [&](auto& /*lanes*/) {
    follow({"wgmma_fence", 0, false, 0});
    current_warp().fenced = true;
  });
}

void WarpgroupProducts::commit() {
  struct {
  } mine;
  scheduler_.gather("wgmma_commit", mine, [&](auto& /*lanes*/) {
    follow({"wgmma_commit", 0, false, 0});
    WarpState& warp = current_warp();
    warp.groups.push_back(warp.open);
    warp.open = 0;
  });
  scheduler_.maybe_preempt();
}

void WarpgroupProducts::wait(int pending) {
  scheduler_.maybe_preempt();
  struct {
  } mine;
  scheduler_.gather("wgmma_wait", mine, [&](auto& /*lanes*/) {
    follow({"wgmma_wait", 0, false, pending});
    WarpState& warp = current_warp();
    if (warp.open > 0) {
      scheduler_.fail(format("wgmma_wait: %zu products are not committed", warp.open));
    }
    const int index = scheduler_.current().warp();
    const Clocks::Knowledge by = clocks_.of_warp(index);
    const Epoch as = clocks_.matrix_reads_done(index);
    while (static_cast<int>(warp.groups.size()) > pending) {
      for (std::size_t i = 0; i < warp.groups.front(); ++i) finish_oldest(warp, by, as);
      warp.groups.erase(warp.groups.begin());
    }
    warp.fenced = false;
  });
}

void WarpgroupProducts::finish_oldest(WarpState& warp, const Clocks::Knowledge& by, Epoch as) {
  const Product& product = warp.products.front();
  const std::uint16_t* raw = product.b;
  for_each_chunk(product, [&](SharedAddress address, int /*k*/, int /*n*/) {
    if (!memory_.finish_read(product.operation, by, as, address, raw, kChunkBytes)) {
      scheduler_.fail(
          format("wgmma_wait: shared address 0x%x (base + %u) has changed since the "
                 "%s that reads it was issued",
                 address, address - kSharedBase, product.operation));
    }
    raw += 8;
  });
  Accumulator* acc = product.accumulator;
  warp.products.pop_front();
  if (--acc->products > 0) return;
  retire(*acc);
  warp.accumulators.remove_if([acc](const Accumulator& other) { return &other == acc; });
}

void WarpgroupProducts::retire(Accumulator& acc) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < acc.columns / 2; ++i) {
      const int row = fragment_group(lane) + 8 * (i / 2 % 2),
                column = 8 * (i / 4) + 2 * fragment_in_group(lane) + i % 2;
      float& d = acc.lanes[lane][i];
      if (std::bit_cast<std::uint32_t>(d) != kPoison) {
        scheduler_.fail(
            format("wgmma_wait: lane %d wrote element %d of an accumulator that was in "
                   "flight",
                   lane, i));
      }
      d = acc.values[row][column];
    }
  }
}

void WarpgroupProducts::block_done() const {
  for (std::size_t w = 0; w < warps_.size(); ++w) {
    const WarpState& warp = warps_[w];
    if (!warp.products.empty()) {
      throw Error(format("block %d: warp %zu ends with %zu wgmma products not waited for",
                         scheduler_.block(), w, warp.products.size()));
    }
    const std::size_t first = w / kWarpgroupWarps * kWarpgroupWarps;
    if (warp.steps != warps_[first].steps) {
      throw Error(
          format("block %d: warp %zu did %zu wgmma operations, warp %zu of its warpgroup "
                 "%zu",
                 scheduler_.block(), w, warp.steps, first, warps_[first].steps));
    }
  }
}

}  // namespace flash_kda::emulation
