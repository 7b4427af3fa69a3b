// A check of a fuzz target: the sanitizers watch for faults, this for wrong answers.
#pragma once

#include <cstdio>
#include <cstdlib>

#define ANNULUS_REQUIRE(condition)                                                        \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)
