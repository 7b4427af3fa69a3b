// What section 9 asks of an error: it is of the right class, and its message names the rule, the value received and the
// remedy.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "annulus/errors.h"

namespace annulus::support {

// Calls f and expects an exception of class Refusal whose message has every one of `parts`.
template <class Refusal, class F>
void expect_refused_as(F f, const std::vector<std::string>& parts) {
  try {
    f();
  } catch (const Refusal& refusal) {
    const std::string message = refusal.what();
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
    return;
  } catch (const std::exception& other) {
    ADD_FAILURE() << "an exception of another class: " << other.what();
    return;
  }
  ADD_FAILURE() << "accepted, though '" << (parts.empty() ? "" : parts.front()) << "' was to be refused";
}

template <class F>
void expect_refused(F f, const std::vector<std::string>& parts) {
  expect_refused_as<InvalidArgument>(f, parts);
}

}  // namespace annulus::support
