// A transport over whatever can move packed bytes: a Carrier is told what to send and receive, and does it.
//
//   class Pigeons : public annulus::Carrier { ... };
//   auto transport = annulus::make_carried_transport(rank, size, std::make_unique<Pigeons>());
//
// The transport checks exchanges, packs strided rows, gathers texts and repeats the first failure for ever; deadlines,
// and how other ranks hear of trouble, are the carrier's. That is how languages that have a messenger of their own
// lend it to Annulus: see annulus_ranks.h for C.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/transport.h"

namespace annulus {

struct PackedMessage {
  int peer = 0;  // never this rank itself
  std::span<std::byte> bytes;
};

struct PackedExchange {
  std::uint64_t plan = 0;
  std::int64_t step = 0;
  std::vector<PackedMessage> sends;     // only read, and may share memory; at most one a peer, none empty
  std::vector<PackedMessage> receives;  // likewise
};

// What it throws becomes the TransportError of this rank. Of a TransportError it has told the others, as far as it can
// reach them; of anything else they hear by abort().
class Carrier {
 public:
  virtual ~Carrier() = default;
  virtual std::string_view name() const { return "carried"; }  // of the transport

  // Begins to move the exchange, and may go on until wait() returns or throws. A message whose plan, step or size is
  // not the receiver's must be an error on both sides.
  virtual void post(const PackedExchange& exchange) = 0;
  // Returns when everything has arrived and everything sent may be overwritten; throws when the deadline has passed.
  virtual void wait() = 0;
  // Makes progress without waiting, also when nothing is under way; need not do anything where bytes move on their own.
  // True when it knows that wait() will not wait. Called by any thread, one at a time.
  virtual bool poll() { return false; }
  // Tells every rank that this one gives up. Called by any thread at any time. Afterwards the memory of the exchange
  // under way is left alone.
  virtual void abort(const std::string& text) noexcept = 0;
};

// Without a carrier: a transport that looks ahead. It agrees with itself and moves nothing, so a RankAttention made
// with it knows its memory and its traffic, and refuses to compute.
std::unique_ptr<Transport> make_carried_transport(int rank, int size, std::unique_ptr<Carrier> carrier);

}  // namespace annulus
