#include "annulus/attention.h"

#include "api/checks.h"
#include "api/own_workspace.h"
#include "api/passes.h"
#include "plan/plan.h"

namespace annulus {

struct Attention::Impl {
  Problem problem;
  Plan plan;
  std::unique_ptr<Passes> passes;

  Impl(const Problem& given, const Options& options)
      : problem(resolve(given)), plan(make_plan(problem)), passes(make_passes(problem, plan, options)) {}

  RowCounts rows() const { return {problem.tokens, problem.tokens}; }
  bool is_empty() const { return problem.batch == 0 || problem.tokens == 0; }
};

Attention::Attention(const Problem& problem, const Options& options)
    : impl_(std::make_unique<Impl>(problem, options)) {}
Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

void Attention::forward(const ForwardArgs& args) const {
  check(args, impl_->problem, impl_->rows(), workspace_bytes(Pass::forward));
  if (!impl_->is_empty()) impl_->passes->forward(args);
}

void Attention::backward(const BackwardArgs& args) const {
  check(args, impl_->problem, impl_->rows(), workspace_bytes(Pass::backward));
  if (!impl_->is_empty()) impl_->passes->backward(args);
}

std::size_t Attention::workspace_bytes(Pass pass) const {
  return static_cast<std::size_t>(total_bytes(impl_->passes->workspace(pass)));
}

std::vector<MemoryComponent> Attention::memory(Pass pass) const {
  return all_memory(impl_->problem, impl_->rows(), pass, impl_->passes->workspace(pass));
}

const Problem& Attention::problem() const { return impl_->problem; }
int Attention::threads() const { return impl_->passes->threads(); }
std::string Attention::instruction_set() const { return impl_->passes->instruction_set(); }
std::string Attention::explain() const {
  return annulus::explain(impl_->plan, impl_->problem) + impl_->passes->explain();
}

std::string version() { return ANNULUS_VERSION; }

}  // namespace annulus
