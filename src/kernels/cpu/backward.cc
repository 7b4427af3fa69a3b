#include "kernels/cpu/backward.h"

#include "kernels/cpu/forward.h"
#include "kernels/thread_pool.h"

namespace annulus::cpu {
namespace {

using Phase = void (*)(const Context&, const PhaseArgs&, Carver&);

void dot_with_dout(const Context& context, const BackwardArgs& args, const ConstTensorView& out, float* deltas) {
  const Blocks blocks(context, context.problem.heads);
  ThreadPool::shared().run(blocks.count(), context.threads, [&](std::int64_t index, int) {
    const Block block = blocks[index];
    context.tiles.dot_rows(source_rows(args.dout, block.batch, block.head, block.memory()),
                           source_rows(out, block.batch, block.head, block.memory()),
                           deltas + context.row_index(block.batch, block.head, block.first_row));
  });
}

// Eq. 7: the whole output is at hand.
void exact_delta(const Context& context, const PhaseArgs& phase, Carver& carver) {
  if (!carver.measuring()) dot_with_dout(context, phase.args, phase.args.out, phase.deltas.data);
}

struct Phases {
  std::int64_t deltas;  // how many
  Phase first;
  Phase second;
};

Phases choose(const Context& context) {
  const bool detached = has_branch_deltas(context.problem);
  return {.deltas = detached ? static_cast<std::int64_t>(context.problem.pattern.branches.size()) : 1,
          .first = detached ? detached_deltas : exact_delta,
          .second = context.problem.dtype == DType::fp32 || context.shard.stepwise ? backward_fused : backward_split};
}

std::int64_t tile_bytes(const Context& context, Phase phase) {
  Carver carver;
  phase(context, {{}, {}, {}}, carver);
  return carver.used_bytes();
}

Deltas carve_deltas(const Context& context, std::int64_t count, Carver& carver) {
  const std::int64_t rows = context.problem.batch * context.problem.heads * context.rows();
  return {carver.take<float>("delta", rows * count), count > 1 ? rows : 0};
}

// Runs the phases one after the other in the same tiles, or measures when the carver has no memory. Delta is made once
// and stays for the steps that follow.
void walk(const Context& context, const BackwardArgs& args, const BackwardStep& step, Carver& carver) {
  const Phases phases = choose(context);
  Deltas deltas = carve_deltas(context, phases.deltas, carver);
  if (step.delta != nullptr) deltas = {const_cast<float*>(step.delta), 0};  // only read from here on
  auto* tiles =
      carver.take<std::byte>("tiles", std::max(tile_bytes(context, phases.first), tile_bytes(context, phases.second)));
  if (carver.measuring()) return;
  for (const Phase phase : {phases.first, phases.second}) {
    if (phase == phases.first && (!step.first || step.has_delta || step.delta != nullptr)) continue;
    Carver phase_carver(tiles);
    phase(context, {args, step, deltas}, phase_carver);
  }
}

}  // namespace

QueryTensors query_tensors(const Context& context, const PhaseArgs& phase, std::int64_t branch) {
  const Problem& problem = context.problem;
  return {
      .q = phase.args.q,
      .dout = phase.args.dout,
      .lse = single_numbers<const void>(phase.args.lse.data(), problem.batch, context.rows(), problem.heads),
      .delta = single_numbers<const void>(phase.deltas.of_branch(branch), problem.batch, context.rows(), problem.heads),
      .dq = phase.step.dq};
}

// Eq. 8: a branch's own output was never stored, so it is computed again, a block at a time.
void detached_deltas(const Context& context, const PhaseArgs& phase, Carver& carver) {
  std::vector<QueryBlock> slots;
  for (int slot = 0; slot < context.threads; ++slot) slots.emplace_back(context, carver);
  if (carver.measuring()) return;
  const Blocks blocks(context, context.problem.heads);
  const auto branches = static_cast<std::int64_t>(context.problem.pattern.branches.size());
  ThreadPool::shared().run(blocks.count() * branches, context.threads, [&](std::int64_t index, int slot) {
    const Block block = blocks[index / branches];
    QueryBlock& work = slots[static_cast<std::size_t>(slot)];
    work.begin(block);
    for (std::int64_t t = block.span->first_task; t < block.span->last_task; ++t) {
      const Task& task = context.plan.tasks[static_cast<std::size_t>(t)];
      if (task.branch != index % branches) continue;
      work.attend(task, phase.args.q, phase.step.sources);
      work.add_padding(task);
    }
    const std::int64_t head_dim = context.problem.head_dim;
    float* delta =
        phase.deltas.of_branch(index % branches) + context.row_index(block.batch, block.head, block.first_row);
    context.tiles.dot_rows(source_rows(phase.args.dout, block.batch, block.head, block.memory()),
                           {work.values(), DType::fp32, padded(head_dim), block.count(), head_dim}, delta);
    const float* factors = work.factors();
    for (std::int64_t i = 0; i < block.count(); ++i) delta[i] *= factors[i];
  });
}

std::vector<MemoryComponent> backward_workspace(const Context& context) {
  Carver carver;
  walk(context, {}, {}, carver);
  return carver.components();
}

void backward(const Context& context, const BackwardArgs& args, const BackwardStep& step) {
  Carver carver(args.workspace.data());
  walk(context, args, step, carver);
}

void delta(const Context& context, const BackwardArgs& args, int branch, const ConstTensorView& out) {
  Carver carver(args.workspace.data());
  dot_with_dout(context, args, out, carve_deltas(context, choose(context).deltas, carver).of_branch(branch));
}

const float* delta(const Context& context, const BackwardArgs& args) {
  Carver carver(args.workspace.data());
  return carve_deltas(context, 1, carver).data;
}

}  // namespace annulus::cpu
