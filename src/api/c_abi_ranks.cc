// The C ABI over annulus::RankAttention, and a Carrier made of the functions that a C program hands over.
#include "annulus/annulus_ranks.h"

#include <array>
#include <cstdio>

#include "annulus/carrier.h"
#include "annulus/ranks.h"
#include "api/c_abi_structs.h"
#include "api/c_status.h"
#include "plan/choice.h"
#include "plan/plan.h"
#include "plan/shard.h"

struct annulus_transport {
  std::unique_ptr<annulus::Transport> transport;
};

struct annulus_rank_attention {
  annulus::RankAttention attention;
  annulus::Sharding sharding;
  annulus::Strategy wanted;
};

namespace annulus {
namespace {

static_assert(ANNULUS_LAYOUT_CONTIGUOUS == static_cast<int>(Layout::contiguous) &&
              ANNULUS_LAYOUT_ZIGZAG == static_cast<int>(Layout::zigzag) &&
              ANNULUS_LAYOUT_STRIPED == static_cast<int>(Layout::striped));
static_assert(ANNULUS_STRATEGY_AUTO == static_cast<int>(Strategy::automatic) &&
              ANNULUS_STRATEGY_EXCHANGE == static_cast<int>(Strategy::exchange) &&
              ANNULUS_STRATEGY_RESHARD == static_cast<int>(Strategy::reshard) &&
              ANNULUS_STRATEGY_RING == static_cast<int>(Strategy::ring) &&
              ANNULUS_STRATEGY_GATHER == static_cast<int>(Strategy::gather) &&
              ANNULUS_STRATEGY_REPLICATED == static_cast<int>(Strategy::replicated));

// Functions of C as a Carrier: their code and sentence become an exception.
class CCarrier final : public Carrier {
 public:
  explicit CCarrier(const annulus_transport_callbacks& callbacks) : callbacks_(callbacks) {}

  void post(const PackedExchange& exchange) override {
    messages(exchange.sends, sends_);
    messages(exchange.receives, receives_);
    exchange_ = {.plan = exchange.plan,
                 .step = exchange.step,
                 .sends = sends_.data(),
                 .send_count = static_cast<std::int64_t>(sends_.size()),
                 .receives = receives_.data(),
                 .receive_count = static_cast<std::int64_t>(receives_.size())};
    call("post", [&](char* message, std::size_t capacity) {
      return callbacks_.post(callbacks_.context, &exchange_, message, capacity);
    });
  }

  void wait() override {
    call("wait",
         [&](char* message, std::size_t capacity) { return callbacks_.wait(callbacks_.context, message, capacity); });
  }

  bool poll() override {
    if (callbacks_.poll != nullptr)
      call("poll",
           [&](char* message, std::size_t capacity) { return callbacks_.poll(callbacks_.context, message, capacity); });
    return false;
  }

  void abort(const std::string& text) noexcept override { callbacks_.abort(callbacks_.context, text.c_str()); }

 private:
  static void messages(const std::vector<PackedMessage>& from, std::vector<annulus_message>& to) {
    to.clear();
    for (const PackedMessage& message : from)
      to.push_back({.peer = message.peer,
                    .reserved = 0,
                    .data = message.bytes.data(),
                    .bytes = static_cast<std::int64_t>(message.bytes.size())});
  }

  template <class F>
  static void call(const char* name, F f) {
    std::array<char, 1024> message{};
    const int status = f(message.data(), message.size());
    if (status == 0) return;
    message.back() = '\0';
    if (message[0] == '\0')
      std::snprintf(message.data(), message.size(), "the transport's %s failed with code %d and said no more", name,
                    status);
    throw TransportError(message.data());
  }

  annulus_transport_callbacks callbacks_;
  std::vector<annulus_message> sends_, receives_;
  annulus_exchange exchange_{};
};

std::unique_ptr<Carrier> to_carrier(const annulus_transport_callbacks& callbacks) {
  const bool any =
      callbacks.post != nullptr || callbacks.wait != nullptr || callbacks.poll != nullptr || callbacks.abort != nullptr;
  if (!any) return nullptr;
  if (callbacks.post == nullptr || callbacks.wait == nullptr || callbacks.abort == nullptr)
    throw InvalidArgument(
        "a transport has the functions post, wait and abort; got some of them: give all three, or none to look ahead");
  return std::make_unique<CCarrier>(callbacks);
}

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

const annulus_rank_attention& target(const annulus_rank_attention* handle) {
  return deref(handle, "attention", "make one with annulus_rank_create");
}

std::string explanation(const annulus_rank_attention& handle) {
  const Problem& problem = handle.attention.problem();
  const Choice choice = choose_strategy(problem, resolve(handle.sharding, problem.tokens), handle.wanted);
  std::string text = explain(make_plan(problem), problem);
  text += std::to_string(handle.sharding.ranks) + " ranks, layout " + std::string(name(handle.sharding.layout)) +
          ", strategy " + std::string(name(handle.wanted)) + ": " + choice.why + "\n";
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
    const annulus_transport_callbacks& given = checked_struct(callbacks, "transport_callbacks");
    result = new annulus_transport{make_carried_transport(given.rank, given.size, to_carrier(given))};
  });
}

void annulus_transport_destroy(annulus_transport* transport) { delete transport; }

int annulus_rank_create(const annulus_problem* problem, const annulus_sharding* sharding, annulus_transport* transport,
                        const annulus_rank_options* options, annulus_rank_attention** attention) {
  return as_status([&] {
    annulus_rank_attention*& result = deref(attention, "attention", "pass the address of the handle");
    result = nullptr;
    Transport& carried = *deref(transport, "transport", "make one with annulus_transport_create").transport;
    try {
      const Problem given = to_problem(checked_struct(problem, "problem"));
      const Sharding shards = to_sharding(checked_struct(sharding, "sharding"));
      const RankOptions chosen = to_rank_options(options);
      result = new annulus_rank_attention{RankAttention(given, shards, carried, chosen), shards, chosen.strategy};
    } catch (const TransportError&) {
      throw;  // the other ranks know
    } catch (const std::exception& error) {
      carried.abort(error.what());  // does nothing where RankAttention has done it
      throw;
    }
  });
}

void annulus_rank_destroy(annulus_rank_attention* attention) { delete attention; }

int annulus_rank_forward(const annulus_rank_attention* attention, const annulus_forward_args* args) {
  return as_status([&] { target(attention).attention.forward(to_args(checked_struct(args, "forward_args"))); });
}

int annulus_rank_backward(const annulus_rank_attention* attention, const annulus_backward_args* args) {
  return as_status([&] { target(attention).attention.backward(to_args(checked_struct(args, "backward_args"))); });
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
