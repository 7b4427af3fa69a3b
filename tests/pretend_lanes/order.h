// What ThreadSanitizer is told of lanes, so that it finds races between them: who runs, and what comes before what.
// Without it these are nothing. The machine itself is compiled without it (ANNULUS_LANES_TSAN says that the rest is
// not).
#pragma once

#if defined(ANNULUS_LANES_TSAN)
extern "C" {
void __tsan_acquire(void* at);
void __tsan_release(void* at);
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}
#endif

namespace annulus::machine {

// What a lane did before it tells `at` comes before what a lane does that hears of `at` later.
inline void tell([[maybe_unused]] void* at) {
#if defined(ANNULUS_LANES_TSAN)
  __tsan_release(at);
#endif
}
inline void hear([[maybe_unused]] void* at) {
#if defined(ANNULUS_LANES_TSAN)
  __tsan_acquire(at);
#endif
}

}  // namespace annulus::machine
