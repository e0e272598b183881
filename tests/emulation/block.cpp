#include "emulation/block.h"

#include "emulation/launch.h"

namespace flash_kda::emulation {

namespace {

Block* running_block = nullptr;

class Running {
 public:
  explicit Running(Block* block) : outer_(running_block) { running_block = block; }
  ~Running() { running_block = outer_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  Block* outer_;
};

}  // namespace

Block& this_block() {
  if (running_block == nullptr) throw std::logic_error("a primitive was called outside run_grid");
  return *running_block;
}

Block::Block(int index, int blocks, int threads, std::size_t shared_bytes, std::uint64_t seed,
             const FiberStacks& stacks)
    : grid_blocks(blocks),
      scheduler(index, threads, seed, stacks),
      clocks(threads),
      registers(scheduler, RegisterPool::of_launch(threads)),
      memory(scheduler, clocks, shared_bytes),
      named_barriers(scheduler, clocks),
      barriers(scheduler, clocks, memory),
      copies(scheduler, clocks, memory, barriers),
      products(scheduler, clocks, memory) {}

void Block::run(const std::function<void()>& body) {
  const Running running(this);
  scheduler.run(
      body, [this](bool forced) { return copies.progress(forced); },
      [this] {
        copies.thread_done();
        named_barriers.thread_done();
      });
  copies.block_done();
  products.block_done();
}

void run_grid(const Launch& launch, const std::function<void(SharedAddress base)>& body) {
  if (launch.blocks < 0) {
    throw std::invalid_argument(format("blocks: expected 0 or more, got %d", launch.blocks));
  }
  const FiberStacks stacks(launch.threads);
  for (int i = 0; i < launch.blocks; ++i) {
    Block block(i, launch.blocks, launch.threads, launch.shared_bytes, launch.seed, stacks);
    block.run([&] { body(kSharedBase); });
  }
}

}  // namespace flash_kda::emulation
