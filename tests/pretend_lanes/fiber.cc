#include "pretend_lanes/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "pretend_lanes/order.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace annulus::machine {
namespace {
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStackBytes = 512 << 10;
#else
constexpr std::size_t kStackBytes = 128 << 10;
#endif
constexpr std::size_t kGuardBytes = 4096;
#if defined(ANNULUS_LANES_TSAN)
constexpr unsigned kNoOrder = 1;  // that one lane runs behind another says nothing
#endif
}  // namespace

void run_fiber(Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
  fiber->arrived();
#endif
  fiber->run_(fiber->of_);
  std::abort();
}

#if defined(__x86_64__)
// Keeps what a call must keep on the stack of who leaves, and goes on where the other one left.
extern "C" void annulus_switch_stacks(void** from, void* to);
extern "C" void annulus_begin_fiber();
asm(R"(
.text
.globl annulus_switch_stacks
.hidden annulus_switch_stacks
.type annulus_switch_stacks,@function
annulus_switch_stacks:
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
.size annulus_switch_stacks,.-annulus_switch_stacks
.globl annulus_begin_fiber
.hidden annulus_begin_fiber
.type annulus_begin_fiber,@function
annulus_begin_fiber:
  movq %r12, %rdi
  callq *%rbx
  ud2
.size annulus_begin_fiber,.-annulus_begin_fiber
)");
#endif

Fiber::~Fiber() {
#if defined(ANNULUS_LANES_TSAN)
  if (known_ != nullptr) __tsan_destroy_fiber(known_);
#endif
  if (stack_ != nullptr) munmap(stack_, kStackBytes);
}

void Fiber::start(void (*run)(void*), void* of) {
  if (stack_ == nullptr) {
    stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack_ == MAP_FAILED || mprotect(stack_, kGuardBytes, PROT_NONE) != 0) {
      std::perror("no stack for a lane of a pretend GPU");
      std::abort();
    }
  }
  run_ = run;
  of_ = of;
#if defined(ANNULUS_LANES_TSAN)
  if (known_ != nullptr) __tsan_destroy_fiber(known_);
  known_ = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  auto* top = reinterpret_cast<std::uintptr_t*>(static_cast<std::byte*>(stack_) + kStackBytes) - 2;
  *--top = reinterpret_cast<std::uintptr_t>(&annulus_begin_fiber);  // where the first switch returns to
  *--top = 0;                                                       // rbp
  *--top = reinterpret_cast<std::uintptr_t>(&run_fiber);            // rbx
  *--top = reinterpret_cast<std::uintptr_t>(this);                  // r12
  for (int i = 0; i < 3; ++i) *--top = 0;
  own_ = top;
#else
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack_;
  own_.uc_stack.ss_size = kStackBytes;
  own_.uc_link = nullptr;
  static_assert(sizeof(int) == 4);
  const auto address = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&own_, reinterpret_cast<void (*)()>(+[](unsigned low, unsigned high) {
    run_fiber(reinterpret_cast<Fiber*>(std::uintptr_t{high} << 32 | low));
  }),
              2, static_cast<unsigned>(address), static_cast<unsigned>(address >> 32));
#endif
}

void Fiber::enter() {
#if defined(ANNULUS_LANES_TSAN)
  outer_known_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(known_, kNoOrder);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* shadow = nullptr;
  __sanitizer_start_switch_fiber(&shadow, static_cast<std::byte*>(stack_) + kGuardBytes, kStackBytes - kGuardBytes);
#endif
#if defined(__x86_64__)
  annulus_switch_stacks(&outer_, own_);
#else
  swapcontext(&outer_, &own_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(shadow, nullptr, nullptr);
#endif
}

void Fiber::leave() {
#if defined(ANNULUS_LANES_TSAN)
  __tsan_switch_to_fiber(outer_known_, kNoOrder);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&shadow_, outer_stack_, outer_bytes_);
#endif
#if defined(__x86_64__)
  annulus_switch_stacks(&own_, outer_);
#else
  swapcontext(&own_, &outer_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  arrived();
#endif
}

#if defined(__SANITIZE_ADDRESS__)
void Fiber::arrived() { __sanitizer_finish_switch_fiber(shadow_, &outer_stack_, &outer_bytes_); }
#endif

}  // namespace annulus::machine
