// The CPU backend behind the interface of kernels.h.
#include "annulus/errors.h"
#include "kernels/cpu/backward.h"
#include "kernels/cpu/forward.h"
#include "kernels/kernels.h"
#include "kernels/thread_pool.h"

namespace annulus {
namespace {

constexpr int kMostThreads = 4096;

int choose_threads(int wanted) {
  if (wanted < 0 || wanted > kMostThreads)
    throw InvalidArgument("threads must lie in [0, " + std::to_string(kMostThreads) + "]; got " +
                          std::to_string(wanted) + ": 0 takes all cores");
  return wanted == 0 ? usable_cores() : wanted;
}

class CpuKernels : public Kernels {
 public:
  CpuKernels(const Problem& problem, const Plan& plan, const Options& options)
      : context_{problem, plan, cpu::find_tiles(options.instruction_set), choose_threads(options.threads)} {
    if (problem.head_dim > cpu::kMaxHeadDim)
      throw Unsupported("the CPU does head sizes from 1 to " + std::to_string(cpu::kMaxHeadDim) + "; got " +
                        std::to_string(problem.head_dim) + ": split the heads");
  }

  std::string_view instruction_set() const override { return context_.tiles.name; }
  int threads() const override { return context_.threads; }

  std::vector<MemoryComponent> workspace(Pass pass) const override {
    return pass == Pass::forward ? cpu::forward_workspace(context_) : cpu::backward_workspace(context_);
  }
  void forward(const ForwardArgs& args) const override { cpu::forward(context_, args); }
  void backward(const BackwardArgs& args) const override { cpu::backward(context_, args); }

 private:
  cpu::Context context_;
};

}  // namespace

std::unique_ptr<Kernels> make_cpu_kernels(const Problem& problem, const Plan& plan, const Options& options) {
  return std::make_unique<CpuKernels>(problem, plan, options);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const cpu::Tiles* tiles : cpu::available_tiles()) names.emplace_back(tiles->name);
  return names;
}

}  // namespace annulus
