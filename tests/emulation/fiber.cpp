#include "emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace flash_kda::emulation {

namespace {

// Large frames are normal: a kernel's registers are locals here, and unoptimised builds keep all.
constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kGuardBytes = 64 * 1024;  // a multiple of any page size in use

void before_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* stack,
                   [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, stack, bytes);
#endif
}

void after_switch([[maybe_unused]] void* saved, [[maybe_unused]] const void** stack,
                  [[maybe_unused]] std::size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, stack, bytes);
#endif
}

}  // namespace

#if FLASH_KDA_EMULATION_USE_UCONTEXT

void Fiber::enter_split(unsigned low, unsigned high) {
  enter(reinterpret_cast<void*>((static_cast<std::uintptr_t>(high) << 32) | low));
}

#else

// swapcontext() makes a system call each time; this saves what the System V ABI asks a callee to
// keep, and nothing else. NOLINTBEGIN(portability-no-assembler): ucontext serves other machines.
extern "C" void flash_kda_emulation_switch(void** save, void* load);
extern "C" void flash_kda_emulation_start();
asm(R"(
.text
.p2align 4
.hidden flash_kda_emulation_switch
.globl flash_kda_emulation_switch
.type flash_kda_emulation_switch, @function
flash_kda_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flash_kda_emulation_switch, .-flash_kda_emulation_switch
.p2align 4
.hidden flash_kda_emulation_start
.globl flash_kda_emulation_start
.type flash_kda_emulation_start, @function
flash_kda_emulation_start:
  movq %r12, %rdi
  callq *%rbx
  ud2
.size flash_kda_emulation_start, .-flash_kda_emulation_start
)");
// NOLINTEND(portability-no-assembler)

#endif

void Fiber::start(std::byte* stack, std::size_t bytes, Entry entry, void* argument) {
  stack_ = stack;
  bytes_ = bytes;
  entry_ = entry;
  argument_ = argument;
  fake_stack_ = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, bytes);  // an abandoned run leaves its marks
#endif
#if FLASH_KDA_EMULATION_USE_UCONTEXT
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = bytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter_split), 2,
              static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
#else
  // What the switch pops: r15, r14, r13, r12, rbx, rbp, then the address to return to. The last one
  // lies at 8 modulo 16, so that flash_kda_emulation_start calls with an aligned stack.
  const auto top = reinterpret_cast<std::uintptr_t>(stack + bytes) & ~std::uintptr_t{15};
  auto* frame = reinterpret_cast<void**>(top) - 9;
  frame[0] = frame[1] = frame[2] = nullptr;
  frame[3] = this;                                    // r12
  frame[4] = reinterpret_cast<void*>(&Fiber::enter);  // rbx
  frame[5] = nullptr;                                 // rbp
  frame[6] = reinterpret_cast<void*>(&flash_kda_emulation_start);
  context_ = static_cast<void*>(frame);
#endif
}

void Fiber::enter(void* self) {
  auto* fiber = static_cast<Fiber*>(self);
  after_switch(nullptr, &fiber->host_stack_, &fiber->host_bytes_);
  fiber->entry_(fiber->argument_);
}

void Fiber::resume() {
  before_switch(&host_fake_stack_, stack_, bytes_);
#if FLASH_KDA_EMULATION_USE_UCONTEXT
  swapcontext(&host_, &context_);
#else
  flash_kda_emulation_switch(&host_, context_);
#endif
  after_switch(host_fake_stack_, nullptr, nullptr);
}

void Fiber::suspend() {
  before_switch(&fake_stack_, host_stack_, host_bytes_);
#if FLASH_KDA_EMULATION_USE_UCONTEXT
  swapcontext(&context_, &host_);
#else
  flash_kda_emulation_switch(&context_, host_);
#endif
  after_switch(fake_stack_, &host_stack_, &host_bytes_);
}

FiberStacks::FiberStacks(int count) : count_(count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * (kStackBytes + kGuardBytes);
  void* memory =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(memory);
  for (int i = 0; i < count; ++i) {
    if (mprotect(stack(i), kStackBytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  }
}

FiberStacks::~FiberStacks() {
  munmap(memory_, static_cast<std::size_t>(count_) * (kStackBytes + kGuardBytes));
}

std::byte* FiberStacks::stack(int index) const {
  return memory_ + static_cast<std::size_t>(index) * (kStackBytes + kGuardBytes) + kGuardBytes;
}

std::size_t FiberStacks::stack_bytes() { return kStackBytes; }

}  // namespace flash_kda::emulation
