#include "api/passes.h"

#include "api/own_workspace.h"
#include "kernels/cuda/load.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace annulus {
namespace {

class CpuPasses : public Passes {
 public:
  CpuPasses(const Problem& problem, const Plan& plan, const Options& options)
      : problem_(problem), kernels_(make_cpu_kernels(problem, plan, options, {{all_rows()}, false})) {}

  std::string instruction_set() const override { return std::string(kernels_->instruction_set()); }
  int threads() const override { return kernels_->threads(); }
  std::string explain() const override { return ""; }
  std::vector<MemoryComponent> workspace(Pass pass) const override { return kernels_->workspace(pass); }

  void forward(const ForwardArgs& args) const override {
    with_workspace(args, Pass::forward, [this](const ForwardArgs& ready) {
      const KeySource own = own_keys({ready.k, ready.v, {}, {}});
      kernels_->forward(ready, {.sources = {&own, 1}});
    });
  }
  void backward(const BackwardArgs& args) const override {
    with_workspace(args, Pass::backward, [this](const BackwardArgs& ready) {
      const KeySource own = own_keys({ready.k, ready.v, ready.dk, ready.dv});
      kernels_->backward(ready, {.sources = {&own, 1}, .dq = ready.dq});
    });
  }

 private:
  Rows all_rows() const { return {0, 1, problem_.tokens}; }
  KeySource own_keys(const KeyTensors& tensors) const { return {problem_, {.owner = 0, .rows = all_rows()}, tensors}; }

  template <class Args, class Run>
  void with_workspace(Args args, Pass pass, Run run) const {
    if (!args.workspace.empty()) return run(args);
    OwnWorkspace own(static_cast<std::size_t>(total_bytes(workspace(pass))));
    args.workspace = own.span();
    run(args);
  }

  const Problem& problem_;
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace

std::unique_ptr<Passes> make_passes(const Problem& problem, const Plan& plan, const Options& options) {
  if (!parse_device(options.device).is_gpu) return std::make_unique<CpuPasses>(problem, plan, options);
  return cuda::load_backend().passes(problem, plan, cuda::pass_options(options));
}

}  // namespace annulus
