#include "annulus/attention.h"

#include "api/checks.h"
#include "api/own_workspace.h"
#include "kernels/kernels.h"
#include "plan/plan.h"

namespace annulus {
namespace {

bool is_empty(const Problem& problem) { return problem.batch == 0 || problem.tokens == 0; }

const Options& checked_device(const Options& options) {
  if (options.device.empty() || options.device == "cpu") return options;
  throw Unsupported("device must be cpu in this build; got " + options.device + ": leave it out");
}

}  // namespace

struct Attention::Impl {
  Problem problem;
  Plan plan;
  std::unique_ptr<Kernels> kernels;

  Impl(const Problem& given, const Options& options)
      : problem(resolve(given)),
        plan(make_plan(problem)),
        kernels(make_cpu_kernels(problem, plan, checked_device(options), {{all_rows()}, false})) {}

  RowCounts rows() const { return {problem.tokens, problem.tokens}; }
  Rows all_rows() const { return {0, 1, problem.tokens}; }
  KeySource own_keys(const KeyTensors& tensors) const { return {problem, {.owner = 0, .rows = all_rows()}, tensors}; }

  std::size_t workspace_bytes(Pass pass) const {
    return static_cast<std::size_t>(total_bytes(kernels->workspace(pass)));
  }

  template <class Args, class Run>
  void run(Args args, Pass pass, Run run) const {
    if (is_empty(problem)) return;
    if (!args.workspace.empty()) return run(args);
    OwnWorkspace own(workspace_bytes(pass));
    args.workspace = own.span();
    run(args);
  }
};

Attention::Attention(const Problem& problem, const Options& options)
    : impl_(std::make_unique<Impl>(problem, options)) {}
Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

void Attention::forward(const ForwardArgs& args) const {
  check(args, impl_->problem, impl_->rows(), workspace_bytes(Pass::forward));
  impl_->run(args, Pass::forward, [this](const ForwardArgs& ready) {
    const KeySource own = impl_->own_keys({ready.k, ready.v, {}, {}});
    impl_->kernels->forward(ready, {.sources = {&own, 1}});
  });
}

void Attention::backward(const BackwardArgs& args) const {
  check(args, impl_->problem, impl_->rows(), workspace_bytes(Pass::backward));
  impl_->run(args, Pass::backward, [this](const BackwardArgs& ready) {
    const KeySource own = impl_->own_keys({ready.k, ready.v, ready.dk, ready.dv});
    impl_->kernels->backward(ready, {.sources = {&own, 1}, .dq = ready.dq});
  });
}

std::size_t Attention::workspace_bytes(Pass pass) const { return impl_->workspace_bytes(pass); }

std::vector<MemoryComponent> Attention::memory(Pass pass) const {
  return all_memory(impl_->problem, impl_->rows(), pass, impl_->kernels->workspace(pass));
}

const Problem& Attention::problem() const { return impl_->problem; }
int Attention::threads() const { return impl_->kernels->threads(); }
std::string Attention::instruction_set() const { return std::string(impl_->kernels->instruction_set()); }
std::string Attention::explain() const { return annulus::explain(impl_->plan, impl_->problem); }

std::string version() { return ANNULUS_VERSION; }

}  // namespace annulus
