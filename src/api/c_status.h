// The border between C++ and C: no exception crosses it, each becomes a code and a message of its thread.
#pragma once

#include "annulus/annulus.h"

namespace annulus {

// To be called in a catch block: the annulus_status of the exception in flight. Keeps its message for
// annulus_last_error.
int record_exception() noexcept;

template <class Call>
int as_status(Call call) noexcept {
  try {
    call();
    return ANNULUS_OK;
  } catch (...) {
    return record_exception();
  }
}

}  // namespace annulus
