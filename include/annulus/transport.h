// Transport: how bytes get from rank to rank, and how ranks learn of each other's trouble.
//
// All ranks of a group run the same plan, so each knows what it will receive. An Exchange is what one rank sends and
// receives in one step; it is posted, moves while the rank computes, and is waited for. At most one exchange is under
// way. Every wait has a deadline, and when a rank is lost, slow beyond the deadline, disagrees or gives up, every other
// rank gets a TransportError that names it and the step. After that the group is of no more use: every call throws the
// same error again.
//
// A rank is heard only when it calls: one that makes no call at all for the length of the timeout counts as lost, while
// one that polls may compute as long as it likes. One thread at a time uses a rank's transport, but poll() and abort()
// may be called by any thread of the rank at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/errors.h"
#include "annulus/strided_block.h"

namespace annulus {

struct Send {
  int peer = 0;
  std::vector<StridedBlock> blocks = {};  // packed one behind the other into one message
};

struct Receive {
  int peer = 0;
  std::span<std::byte> bytes = {};  // exactly as many as the peer sends; anything else is an error on both sides
};

struct Exchange {
  std::uint64_t plan = 0;              // a hash that all ranks share: messages of another plan are refused
  std::int64_t step = 0;               // named in errors
  std::vector<Send> sends = {};        // at most one a peer; empty messages are not sent; a rank may send to itself
  std::vector<Receive> receives = {};  // at most one a peer
  // GPU memory: the CUDA stream whose earlier work makes what is sent and frees what is received; all of it then lies
  // on the rank's GPU. Null: memory of the host. (The default stream has the handle cudaStreamLegacy.)
  void* stream = nullptr;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Begins to move the exchange. What it sends must stay as it is, and what it receives must not be read, until wait()
  // returns or throws. With a stream it does not wait for the GPU, and only work queued after wait() may touch either.
  virtual void post(const Exchange& exchange) = 0;
  // Makes progress without waiting: called between tiles by whoever computes. True when nothing is under way.
  virtual bool poll() = 0;
  // Returns when all receives are complete and all sends may be overwritten: by work that is queued on the stream from
  // now on, where the exchange has one.
  virtual void wait() = 0;

  // Every rank's text, in order of rank: how ranks agree on the problem before the first transfer. A collective with a
  // deadline, not to be called while an exchange is under way.
  virtual std::vector<std::string> all_gather(const std::string& text) = 0;

  // Tells every rank that this one gives up, and why: their next or current call throws. Never throws, and waits for
  // nothing but the copies of this rank's memory that are being made: afterwards nobody reads or writes it.
  virtual void abort(const std::string& reason) noexcept = 0;

  // What the transport itself takes for packing, of the host and of a GPU: the same from its making to its end.
  virtual std::int64_t staging_bytes() const { return 0; }
  virtual std::int64_t device_staging_bytes() const { return 0; }  // the part of it that lies on a GPU

  // Payload of exchanges, counted as it is posted (sent) and as it has arrived (received); what a rank sends to itself
  // does not count.
  std::int64_t sent_bytes() const { return sent_bytes_; }
  std::int64_t received_bytes() const { return received_bytes_; }

 protected:
  std::int64_t sent_bytes_ = 0;
  std::int64_t received_bytes_ = 0;
};

struct TransportOptions {
  std::chrono::milliseconds timeout{60'000};  // no sign of life for this long: the peer counts as lost
  // A rank that is slow but alive is named here, once. Called within wait(), so it must neither call the transport nor
  // throw: to give up, set `stop`.
  std::function<void(const std::string&)> warn = {};
  const std::atomic<bool>* stop = nullptr;  // once true (a signal handler may set it), this rank gives up
  bool blocking = false;                    // post() also waits: nothing overlaps, for debugging
};

}  // namespace annulus
