// Where the conformance suite runs: something that makes a group and calls a function for each rank of it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "annulus/transport.h"

namespace annulus {

class Ranks {
 public:
  using Body = std::function<void(std::unique_ptr<Transport>)>;

  virtual ~Ranks() = default;
  virtual int size() const = 0;
  // Makes a group, calls `body` once for every rank that lives in this process, and returns when all ranks are through.
  virtual void run(const TransportOptions& options, const Body& body) = 0;
};

struct RanksParam {
  std::string name;
  std::function<std::unique_ptr<Ranks>()> make;
  bool sends_wait = true;        // for the receiver
  bool tells_by_tokens = false;  // texts are gathered first, then tokens say who sends what: errors are worded by those
  std::function<std::string()> missing = [] { return std::string(); };  // why there can be no such group here, if so
};

inline std::ostream& operator<<(std::ostream& out, const RanksParam& param) { return out << param.name; }

}  // namespace annulus
