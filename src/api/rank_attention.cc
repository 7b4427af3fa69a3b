#include <optional>

#include "annulus/errors.h"
#include "annulus/ranks.h"
#include "api/checks.h"
#include "api/own_workspace.h"
#include "exec/executor.h"
#include "exec/rates.h"
#include "kernels/cuda/load.h"
#include "kernels/device.h"
#include "plan/choice.h"
#include "plan/shard.h"

namespace annulus {
namespace {

// Whatever goes wrong on this rank must not leave the others waiting.
template <class F>
auto together(Transport& transport, F f) {
  try {
    return f();
  } catch (const TransportError&) {
    throw;  // they know
  } catch (const std::exception& error) {
    transport.abort(error.what());
    throw;
  }
}

Sharding checked_sharding(const Sharding& given, const Problem& problem, const Transport& transport) {
  Sharding sharding = resolve(given, problem.tokens);
  if (transport.size() != sharding.ranks)
    throw InvalidArgument("the sharding must have as many ranks as the transport; got " +
                          std::to_string(sharding.ranks) + " and " + std::to_string(transport.size()) +
                          ": give the same number");
  return sharding;
}

RankOptions resolved(RankOptions options, const Problem& problem, const Sharding& sharding) {
  if (options.slot_bytes < 1)
    throw InvalidArgument("slot_bytes must be at least 1; got " + std::to_string(options.slot_bytes) +
                          ": leave it out for 32 MiB");
  const Rates rates = rates_of(options.device);
  options = with_strategies(std::move(options), problem, sharding, rates);
  if (options.reproducible && options.strategy == Strategy::replicated)
    throw Unsupported("replicated queries have no reproducible mode; got both: choose another strategy");
  return options;
}

std::unique_ptr<Executor> make_executor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                        Transport& transport, const RankOptions& options) {
  if (options.strategy == Strategy::replicated)
    return make_replicated_executor(problem, plan, sharding, transport, options);
  return options.reproducible ? make_complete_executor(problem, plan, sharding, transport, options)
                              : make_streaming_executor(problem, plan, sharding, transport, options);
}

RowCounts count(const Executor& executor, const Problem& problem) {
  const std::int64_t rows = count_rows(executor.pieces());
  return {executor.replicates_queries() ? problem.tokens : rows, rows};
}

}  // namespace

struct RankAttention::Impl {
  Problem problem;
  Sharding sharding;
  Plan plan;
  Transport& transport;
  RankOptions options;
  std::unique_ptr<Executor> executor;
  RowCounts rows;

  Impl(const Problem& given, const Sharding& given_sharding, Transport& given_transport,
       const RankOptions& given_options)
      : problem(resolve(given)),
        sharding(checked_sharding(given_sharding, problem, given_transport)),
        plan(make_plan(problem)),
        transport(given_transport),
        options(resolved(given_options, problem, sharding)),
        executor(make_executor(problem, plan, sharding, transport, options)),
        rows(count(*executor, problem)) {}

  std::size_t workspace_bytes(Pass pass) const {
    return static_cast<std::size_t>(total_bytes(executor->workspace(pass)));
  }
  // For one call. Freeing it waits for the device: who is in a hurry brings a workspace.
  std::unique_ptr<cuda::DeviceMemory> device_memory(std::size_t bytes) const {
    return cuda::load_backend().allocate(cuda::device_index(options.device.device), bytes);
  }

  bool on_gpu() const { return parse_device(options.device.device).is_gpu; }

  template <class Args, class Run>
  void run(Args args, Pass pass, Run run) const {
    const std::size_t bytes = together(transport, [&] {
      const std::size_t needed = workspace_bytes(pass);
      check(args, problem, rows, needed);
      return needed;
    });
    if (problem.batch == 0 || problem.tokens == 0) return;
    std::optional<OwnWorkspace> own;
    std::unique_ptr<cuda::DeviceMemory> on_device;
    if (on_gpu() && args.stream == nullptr) args.stream = cuda::kDefaultStream;
    if (args.workspace.empty())
      together(transport, [&] {
        if (!on_gpu()) {
          args.workspace = own.emplace(bytes).span();
          return;
        }
        on_device = device_memory(bytes);
        args.workspace = {static_cast<std::byte*>(on_device->data()), bytes};
      });
    // The workspace outlives the call to abort: others may be reading slots in it.
    together(transport, [&] { run(args); });
  }
};

RankAttention::RankAttention(const Problem& problem, const Sharding& sharding, Transport& transport,
                             const RankOptions& options)
    : impl_(together(transport, [&] { return std::make_unique<Impl>(problem, sharding, transport, options); })) {}
RankAttention::~RankAttention() = default;
RankAttention::RankAttention(RankAttention&&) noexcept = default;
RankAttention& RankAttention::operator=(RankAttention&&) noexcept = default;

void RankAttention::forward(const ForwardArgs& args) const {
  impl_->run(args, Pass::forward, [this](const ForwardArgs& ready) { impl_->executor->forward(ready); });
}

void RankAttention::backward(const BackwardArgs& args) const {
  impl_->run(args, Pass::backward, [this](const BackwardArgs& ready) { impl_->executor->backward(ready); });
}

std::int64_t RankAttention::rows() const { return impl_->rows.keys; }
std::int64_t RankAttention::query_rows() const { return impl_->rows.queries; }

std::vector<std::int64_t> RankAttention::positions() const {
  std::vector<std::int64_t> result;
  for (const Rows& piece : impl_->executor->pieces())
    for (std::int64_t i = 0; i < piece.count; ++i) result.push_back(piece[i]);
  return result;
}

const Problem& RankAttention::problem() const { return impl_->problem; }
std::size_t RankAttention::workspace_bytes(Pass pass) const { return impl_->workspace_bytes(pass); }
std::vector<MemoryComponent> RankAttention::memory(Pass pass) const {
  return all_memory(impl_->problem, impl_->rows, pass, impl_->executor->workspace(pass));
}
RankTraffic RankAttention::traffic(Pass pass) const { return impl_->executor->traffic(pass); }
const std::vector<Strategy>& RankAttention::strategies() const { return impl_->options.branches; }
int RankAttention::threads() const { return impl_->executor->kernels().threads(); }
std::string RankAttention::instruction_set() const { return std::string(impl_->executor->kernels().instruction_set()); }

}  // namespace annulus
