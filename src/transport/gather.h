// All ranks' texts on every rank, made of exchanges: whatever a transport promises of those holds here too.
//
// In each round a rank has the texts of `have` ranks from its own on, hands them to rank - have and gets as many from
// rank + have: log2(size) rounds, each text crosses once to each rank, and no size must be a power of two. The lengths
// go first, so that the texts' sizes are known.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "annulus/transport.h"

namespace annulus {

// `run` posts an exchange and waits for it.
std::vector<std::string> gather_texts(int rank, int size, const std::string& text,
                                      const std::function<void(const Exchange&)>& run);

}  // namespace annulus
