// A thread of the emulated block: a stack of its own, entered and left by hand.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(FLASH_KDA_EMULATION_UCONTEXT)
#define FLASH_KDA_EMULATION_USE_UCONTEXT 1
#include <ucontext.h>
#else
#define FLASH_KDA_EMULATION_USE_UCONTEXT 0
#endif

namespace flash_kda::emulation {

class Fiber {
 public:
  using Entry = void (*)(void* argument);

  // Prepares a fresh run on `stack`. `entry` must not return: it ends with suspend(). A fiber that
  // was left in the middle of an earlier run is forgotten; its destructors do not run.
  void start(std::byte* stack, std::size_t bytes, Entry entry, void* argument);
  // Runs the fiber until it suspends itself.
  void resume();
  // Back to whoever resumed this fiber. Called on the fiber's own stack.
  void suspend();

 private:
  static void enter(void* self);

  std::byte* stack_ = nullptr;
  std::size_t bytes_ = 0;
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
#if FLASH_KDA_EMULATION_USE_UCONTEXT
  static void enter_split(unsigned low, unsigned high);
  ucontext_t context_{}, host_{};
#else
  void* context_ = nullptr;
  void* host_ = nullptr;
#endif
  // AddressSanitizer follows the switches by these.
  void* fake_stack_ = nullptr;
  void* host_fake_stack_ = nullptr;
  const void* host_stack_ = nullptr;
  std::size_t host_bytes_ = 0;
};

// The stacks of one grid's threads, each above a page that must not be touched.
class FiberStacks {
 public:
  explicit FiberStacks(int count);
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  std::byte* stack(int index) const;
  static std::size_t stack_bytes();

 private:
  int count_;
  std::byte* memory_;
};

}  // namespace flash_kda::emulation
