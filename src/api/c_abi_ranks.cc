// The C ABI over annulus::RankAttention.
#include "annulus/annulus_ranks.h"

#include "annulus/ranks.h"
#include "api/c_abi_structs.h"
#include "api/c_abi_transport.h"
#include "api/c_status.h"
#include "plan/choice.h"
#include "plan/plan.h"
#include "plan/shard.h"

struct annulus_rank_attention {
  annulus::RankAttention attention;
  annulus::Sharding sharding;
  annulus::Strategy wanted;
  annulus::Transport& transport;
  std::string payload;  // the transport of a GPU's memory; empty on the CPU
};

namespace annulus {
namespace {

static_assert(ANNULUS_LAYOUT_CONTIGUOUS == static_cast<int>(Layout::contiguous) &&
              ANNULUS_LAYOUT_ZIGZAG == static_cast<int>(Layout::zigzag) &&
              ANNULUS_LAYOUT_STRIPED == static_cast<int>(Layout::striped));
static_assert(ANNULUS_PAYLOAD_AUTO == static_cast<int>(Payload::automatic) &&
              ANNULUS_PAYLOAD_STAGED == static_cast<int>(Payload::staged) &&
              ANNULUS_PAYLOAD_NCCL == static_cast<int>(Payload::nccl));
static_assert(ANNULUS_STRATEGY_AUTO == static_cast<int>(Strategy::automatic) &&
              ANNULUS_STRATEGY_EXCHANGE == static_cast<int>(Strategy::exchange) &&
              ANNULUS_STRATEGY_RESHARD == static_cast<int>(Strategy::reshard) &&
              ANNULUS_STRATEGY_RING == static_cast<int>(Strategy::ring) &&
              ANNULUS_STRATEGY_GATHER == static_cast<int>(Strategy::gather) &&
              ANNULUS_STRATEGY_REPLICATED == static_cast<int>(Strategy::replicated));

Sharding to_sharding(const annulus_sharding& from) {
  const auto boundaries = checked_list(from.boundaries, from.boundary_count, "boundaries");
  return {.ranks = from.ranks,
          .layout = checked_enum<Layout>("layout", from.layout, ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_STRIPED),
          .boundaries = {boundaries.begin(), boundaries.end()}};
}

RankOptions to_rank_options(const annulus_rank_options* from) {
  RankOptions options;
  if (from == nullptr) return options;
  const annulus_rank_options& given = checked_struct(from, "rank_options");
  options.device = to_options(given.device);
  options.strategy =
      checked_enum<Strategy>("strategy", given.strategy, ANNULUS_STRATEGY_AUTO, ANNULUS_STRATEGY_REPLICATED);
  options.reproducible = given.reproducible != 0;
  if (given.slot_bytes != 0) options.slot_bytes = given.slot_bytes;
  return options;
}

PayloadOptions to_payload(const annulus_rank_options* from) {
  PayloadOptions options;
  if (from == nullptr) return options;
  options.payload = checked_enum<Payload>("payload", from->payload, ANNULUS_PAYLOAD_AUTO, ANNULUS_PAYLOAD_NCCL);
  if (from->timeout_ms < 0)
    throw InvalidArgument("timeout_ms must not be negative; got " + std::to_string(from->timeout_ms) +
                          ": leave it 0 for a minute");
  if (from->timeout_ms != 0) options.timeout = std::chrono::milliseconds(from->timeout_ms);
  return options;
}

const annulus_rank_attention& target(const annulus_rank_attention* handle) {
  return deref(handle, "attention", "make one with annulus_rank_create");
}

// Arguments that cannot be read are an error of this rank alone: the others must not wait for it.
template <class Read>
auto read_or_abort(const annulus_rank_attention& handle, Read read) {
  try {
    return read();
  } catch (const std::exception& error) {
    handle.transport.abort(error.what());
    throw;
  }
}

std::string explanation(const annulus_rank_attention& handle) {
  const Problem& problem = handle.attention.problem();
  const Rates rates{.favours_whole_groups = !handle.payload.empty()};
  const Choice choice = choose_strategy(problem, resolve(handle.sharding, problem.tokens), handle.wanted, rates);
  std::string text = explain(make_plan(problem), problem);
  text += std::to_string(handle.sharding.ranks) + " ranks, layout " + std::string(name(handle.sharding.layout)) +
          ", strategy " + std::string(name(handle.wanted)) + ": " + choice.why + "\n";
  if (!handle.payload.empty()) text += "payload by " + handle.payload + "\n";
  for (std::size_t i = 0; i < choice.branches.size(); ++i)
    text += "branch " + std::to_string(i) + ": " + std::string(name(handle.attention.strategies()[i])) + ", " +
            choice.branches[i].why + "\n";
  return text;
}

}  // namespace
}  // namespace annulus

using namespace annulus;  // NOLINT(google-build-using-namespace): what follows is C

extern "C" {

int annulus_transport_create(const annulus_transport_callbacks* callbacks, annulus_transport** transport) {
  return as_status([&] {
    annulus_transport*& result = deref(transport, "transport", "pass the address of the handle");
    result = nullptr;
    result = new annulus_transport(checked_struct(callbacks, "transport_callbacks"));
  });
}

void annulus_transport_destroy(annulus_transport* transport) { delete transport; }

int annulus_rank_create(const annulus_problem* problem, const annulus_sharding* sharding, annulus_transport* transport,
                        const annulus_rank_options* options, annulus_rank_attention** attention) {
  return as_status([&] {
    annulus_rank_attention*& result = deref(attention, "attention", "pass the address of the handle");
    result = nullptr;
    annulus_transport& carried = deref(transport, "transport", "make one with annulus_transport_create");
    Transport* moves = &carried.host();
    try {
      const Problem given = to_problem(checked_struct(problem, "problem"));
      const Sharding shards = to_sharding(checked_struct(sharding, "sharding"));
      const RankOptions chosen = to_rank_options(options);
      moves = &carried.of(chosen.device, to_payload(options));
      result = new annulus_rank_attention{RankAttention(given, shards, *moves, chosen), shards, chosen.strategy, *moves,
                                          moves == &carried.host() ? "" : std::string(moves->name())};
    } catch (const TransportError&) {
      throw;  // the other ranks know
    } catch (const std::exception& error) {
      moves->abort(error.what());  // does nothing where RankAttention has done it
      throw;
    }
  });
}

void annulus_rank_destroy(annulus_rank_attention* attention) { delete attention; }

int annulus_rank_forward(const annulus_rank_attention* attention, const annulus_forward_args* args) {
  return as_status([&] {
    const annulus_rank_attention& handle = target(attention);
    handle.attention.forward(read_or_abort(handle, [&] { return to_args(checked_struct(args, "forward_args")); }));
  });
}

int annulus_rank_backward(const annulus_rank_attention* attention, const annulus_backward_args* args) {
  return as_status([&] {
    const annulus_rank_attention& handle = target(attention);
    handle.attention.backward(read_or_abort(handle, [&] { return to_args(checked_struct(args, "backward_args")); }));
  });
}

int annulus_rank_rows(const annulus_rank_attention* attention, int64_t* rows, int64_t* query_rows) {
  return as_status([&] {
    const RankAttention& rank = target(attention).attention;
    deref(rows, "rows", "pass the address of an int64_t") = rank.rows();
    deref(query_rows, "query_rows", "pass the address of an int64_t") = rank.query_rows();
  });
}

int annulus_rank_workspace_bytes(const annulus_rank_attention* attention, int pass, size_t* bytes) {
  return as_status([&] {
    size_t& result = deref(bytes, "bytes", "pass the address of a size_t");
    result = target(attention).attention.workspace_bytes(to_pass(pass));
  });
}

int annulus_rank_explain(const annulus_rank_attention* attention, char* buffer, size_t capacity, size_t* length) {
  return as_status([&] { copy_text(explanation(target(attention)), buffer, capacity, length); });
}

int annulus_rank_memory(const annulus_rank_attention* attention, int pass, annulus_memory_component* components,
                        size_t capacity, size_t* count) {
  return as_status(
      [&] { copy_components(target(attention).attention.memory(to_pass(pass)), components, capacity, count); });
}

int annulus_rank_traffic(const annulus_rank_attention* attention, int pass, int64_t* sent_bytes,
                         int64_t* received_bytes) {
  return as_status([&] {
    const RankTraffic traffic = target(attention).attention.traffic(to_pass(pass));
    deref(sent_bytes, "sent_bytes", "pass the address of an int64_t") = traffic.sent_bytes;
    deref(received_bytes, "received_bytes", "pass the address of an int64_t") = traffic.received_bytes;
  });
}

int annulus_positions(const annulus_sharding* sharding, int64_t tokens, int32_t rank, int64_t* positions,
                      size_t capacity, size_t* count) {
  return as_status([&] {
    size_t& result = deref(count, "count", "pass the address of a size_t");
    if (capacity > 0) deref(positions, "positions", "pass an array, or a capacity of 0");
    if (tokens < 0)
      throw InvalidArgument("tokens must be at least 0; got " + std::to_string(tokens) + ": give a larger one");
    const Sharding shards = resolve(to_sharding(checked_struct(sharding, "sharding")), tokens);
    if (rank < 0 || rank >= shards.ranks)
      throw InvalidArgument("a rank lies in [0, ranks); got rank " + std::to_string(rank) + " of " +
                            std::to_string(shards.ranks) + ": give the rank whose positions you want");
    result = 0;
    for (const Rows& piece : pieces_of(shards, tokens, rank))
      for (int64_t i = 0; i < piece.count; ++i, ++result)
        if (result < capacity) positions[result] = piece[i];
  });
}

}  // extern "C"
