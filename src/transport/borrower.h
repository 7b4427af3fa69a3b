// Borrower: a transport of the host that also moves memory which it is lent once, without a copy: where MPI is
// CUDA-aware, memory of GPUs. Whoever lends packs into that memory and unpacks from it, and knows when.
#pragma once

#include <memory>

#include "transport/device_copies.h"

namespace annulus {

class Borrower {
 public:
  virtual ~Borrower() = default;

  // Whether it may be memory of a GPU.
  virtual bool takes_device_memory() const = 0;

  // From the next exchange on, a message that is one dense run of this memory leaves it as it lies there, and one that
  // is received there arrives there: no thread touches it. Both ends of a message lie in lent memory, or neither does.
  // After a failure the network may still be at it. So it is shared, and lives for as long as that may be.
  virtual void borrow(std::shared_ptr<OwnedBytes> memory) = 0;
};

}  // namespace annulus
