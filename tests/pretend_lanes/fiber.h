// A function with a stack of its own, which can be left and entered again.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace annulus::machine {

class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  Fiber(Fiber&&) = delete;

  // `run(of)` when it is entered first. It must not return: it leaves for the last time.
  void start(void (*run)(void*), void* of);
  void enter();
  void leave();

 private:
  void* stack_ = nullptr;
#if defined(__x86_64__)
  void *own_ = nullptr, *outer_ = nullptr;  // stack pointers
#else
  ucontext_t own_, outer_;
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* shadow_ = nullptr;
  const void* outer_stack_ = nullptr;
  std::size_t outer_bytes_ = 0;
  void arrived();
#endif
#if defined(ANNULUS_LANES_TSAN)
  void *known_ = nullptr, *outer_known_ = nullptr;  // to ThreadSanitizer
#endif
  void (*run_)(void*) = nullptr;
  void* of_ = nullptr;
  friend void run_fiber(Fiber* fiber);
};

}  // namespace annulus::machine
