#include "annulus/attention.h"

#include <new>

#include "api/checks.h"
#include "kernels/kernels.h"
#include "plan/plan.h"

namespace annulus {
namespace {

constexpr std::size_t kAlignment = 64;

// Memory for one call whose caller brought none.
class OwnWorkspace {
 public:
  explicit OwnWorkspace(std::size_t bytes) : bytes_(bytes) {
    data_ = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment}, std::nothrow));
    if (data_ == nullptr)
      throw OutOfMemory("the workspace needs " + std::to_string(bytes) +
                        " bytes; the system has no more: use fewer threads or tokens");
  }
  ~OwnWorkspace() { ::operator delete (data_, std::align_val_t{kAlignment}); }
  OwnWorkspace(const OwnWorkspace&) = delete;
  OwnWorkspace& operator=(const OwnWorkspace&) = delete;

  std::span<std::byte> span() { return {data_, bytes_}; }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

bool is_empty(const Problem& problem) { return problem.batch == 0 || problem.tokens == 0; }

}  // namespace

struct Attention::Impl {
  Problem problem;
  Plan plan;
  std::unique_ptr<Kernels> kernels;

  Impl(const Problem& given, const Options& options)
      : problem(resolve(given)),
        plan(make_plan(problem)),
        kernels(make_cpu_kernels(problem, plan, options, {{all_rows()}, false})) {}

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
  ArgumentChecks checks(impl_->problem);
  checks.input("q", args.q, impl_->problem.heads);
  checks.input("k", args.k, impl_->problem.kv_heads);
  checks.input("v", args.v, impl_->problem.kv_heads);
  checks.output("out", args.out, impl_->problem.heads);
  if (!args.lse.empty()) checks.output("lse", args.lse);
  checks.workspace(args.workspace, workspace_bytes(Pass::forward));
  checks.overlaps();
  impl_->run(args, Pass::forward, [this](const ForwardArgs& ready) {
    const KeySource own = impl_->own_keys({ready.k, ready.v, {}, {}});
    impl_->kernels->forward(ready, {.sources = {&own, 1}});
  });
}

void Attention::backward(const BackwardArgs& args) const {
  ArgumentChecks checks(impl_->problem);
  checks.input("q", args.q, impl_->problem.heads);
  checks.input("k", args.k, impl_->problem.kv_heads);
  checks.input("v", args.v, impl_->problem.kv_heads);
  checks.input("out", args.out, impl_->problem.heads);
  checks.input("lse", args.lse);
  checks.input("dout", args.dout, impl_->problem.heads);
  checks.output("dq", args.dq, impl_->problem.heads);
  checks.output("dk", args.dk, impl_->problem.kv_heads);
  checks.output("dv", args.dv, impl_->problem.kv_heads);
  checks.workspace(args.workspace, workspace_bytes(Pass::backward));
  checks.overlaps();
  impl_->run(args, Pass::backward, [this](const BackwardArgs& ready) {
    const KeySource own = impl_->own_keys({ready.k, ready.v, ready.dk, ready.dv});
    impl_->kernels->backward(ready, {.sources = {&own, 1}, .dq = ready.dq});
  });
}

std::size_t Attention::workspace_bytes(Pass pass) const { return impl_->workspace_bytes(pass); }

std::vector<MemoryComponent> Attention::memory(Pass pass) const {
  const Problem& problem = impl_->problem;
  const std::int64_t rows = problem.batch * problem.tokens;
  const std::int64_t row_bytes = problem.head_dim * size_of(problem.dtype);
  const std::int64_t of_q = rows * problem.heads * row_bytes;
  const std::int64_t of_k = rows * problem.kv_heads * row_bytes;
  std::vector<MemoryComponent> result{
      {"q", of_q}, {"k", of_k}, {"v", of_k}, {"out", of_q}, {"lse", rows * problem.heads * 4}};
  if (pass == Pass::backward)
    for (const MemoryComponent& gradient : {MemoryComponent{"dout", of_q}, {"dq", of_q}, {"dk", of_k}, {"dv", of_k}})
      result.push_back(gradient);
  for (const MemoryComponent& part : impl_->kernels->workspace(pass)) result.push_back(part);
  return result;
}

const Problem& Attention::problem() const { return impl_->problem; }
int Attention::threads() const { return impl_->kernels->threads(); }
std::string Attention::instruction_set() const { return std::string(impl_->kernels->instruction_set()); }
std::string Attention::explain() const { return annulus::explain(impl_->plan, impl_->problem); }

std::string version() { return ANNULUS_VERSION; }

}  // namespace annulus
