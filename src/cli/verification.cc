#include "cli/verification.h"

#include <algorithm>
#include <cstring>

#include "cli/workload.h"
#include "kernels/thread_pool.h"
#include "numeric/half.h"
#include "reference/reference.h"

namespace annulus::cli {
namespace {

template <class T>
std::vector<double> widen(const void* data, std::int64_t count) {
  const auto* elements = static_cast<const T*>(data);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    values[static_cast<std::size_t>(i)] = static_cast<double>(to_float(elements[i]));
  return values;
}

std::vector<double> as_doubles(const Workload& work, const std::string& name) {
  switch (work.dtype(name)) {
    case DType::bf16:
      return widen<BFloat16>(work.data(name), work.elements(name));
    case DType::fp16:
      return widen<Float16>(work.data(name), work.elements(name));
    case DType::fp32:
      break;
  }
  return widen<float>(work.data(name), work.elements(name));
}

reference::Result result_of(const Workload& work) {
  return {.out = as_doubles(work, "out"),
          .lse = as_doubles(work, "lse"),
          .dq = as_doubles(work, "dq"),
          .dk = as_doubles(work, "dk"),
          .dv = as_doubles(work, "dv")};
}

std::int64_t different_elements(const Workload& a, const Workload& b, const std::string& name) {
  const auto* left = static_cast<const std::byte*>(a.data(name));
  const auto* right = static_cast<const std::byte*>(b.data(name));
  const auto size = static_cast<std::size_t>(size_of(a.dtype(name)));
  std::int64_t different = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.elements(name)); ++i)
    different += std::memcmp(left + i * size, right + i * size, size) != 0 ? 1 : 0;
  return different;
}

class Verifier {
 public:
  Verifier(const Problem& problem, const VerifySettings& settings, const std::function<void(const std::string&)>& step)
      : problem_(problem), settings_(settings), step_(step), drawn_(problem) {
    threads_ = settings.threads > 0 ? settings.threads : usable_cores();
    drawn_.draw(settings.seed, threads_, Pass::backward);
  }

  std::vector<VerifyCheck> run() {
    const reference::Inputs inputs{.q = as_doubles(drawn_, "q"),
                                   .k = as_doubles(drawn_, "k"),
                                   .v = as_doubles(drawn_, "v"),
                                   .dout = as_doubles(drawn_, "dout")};
    step_("fp64 reference");
    const reference::Result exact = reference::exact(problem_, inputs, threads_);
    step_("textbook in " + std::string(name(problem_.dtype)));
    const reference::Result textbook = reference::textbook(problem_, inputs, threads_);
    for (const std::string& set : settings_.instruction_sets) check_instruction_set(set, exact, textbook);
    return checks_;
  }

 private:
  void check_instruction_set(const std::string& set, const reference::Result& exact,
                             const reference::Result& textbook) {
    step_(set);
    Workload first(problem_);
    compute(first, set, threads_);
    for (const reference::Check& check : reference::compare(problem_, result_of(first), exact, textbook))
      checks_.push_back({set + " against fp64", check.tensor, check.max_error, check.bound, check.passed});
    const int other_threads = threads_ == 1 ? 2 : 1;
    compare_bits(first, set, threads_, set + " run again");
    compare_bits(first, set, other_threads,
                 set + " with " + std::to_string(other_threads) + (other_threads == 1 ? " thread" : " threads"));
  }

  void compare_bits(const Workload& first, const std::string& set, int threads, const std::string& what) {
    step_(what);
    Workload again(problem_);
    compute(again, set, threads);
    for (const std::string& name : result_names(Pass::backward)) {
      const std::int64_t different = different_elements(first, again, name);
      checks_.push_back({what, name, static_cast<double>(different), 0, different == 0});
    }
  }

  void compute(Workload& work, const std::string& set, int threads) const {
    const Attention attention(problem_, {.threads = threads, .instruction_set = set});
    for (const std::string& name : input_names(Pass::backward)) work.borrow(name, drawn_.data(name));
    work.forward(attention);
    work.backward(attention);
  }

  const Problem& problem_;
  const VerifySettings& settings_;
  const std::function<void(const std::string&)>& step_;
  Workload drawn_;
  int threads_ = 1;
  std::vector<VerifyCheck> checks_;
};

}  // namespace

std::vector<VerifyCheck> verify(const Problem& problem, const VerifySettings& settings,
                                const std::function<void(const std::string&)>& step) {
  return Verifier(problem, settings, step).run();
}

std::int64_t verify_steps(const VerifySettings& settings) {
  return 2 + 3 * static_cast<std::int64_t>(settings.instruction_sets.size());
}

std::int64_t verify_bytes(const Problem& problem) {
  // In floating point, since a problem may be as large as 64 bits allow and this is several times that.
  const double rows = static_cast<double>(problem.batch) * static_cast<double>(problem.tokens);
  const double lse = rows * static_cast<double>(problem.heads);
  const double inputs =
      2 * (lse + rows * static_cast<double>(problem.kv_heads)) * static_cast<double>(problem.head_dim);
  const double results = inputs + lse;
  // Two runs of the product at a time; inputs, exact, textbook and the product's results in fp64.
  const double bytes =
      static_cast<double>(size_of(problem.dtype)) * (inputs + 2 * results) + 8 * (inputs + 3 * results);
  return static_cast<std::int64_t>(std::min(bytes, 0x1p62));
}

bool all_passed(const std::vector<VerifyCheck>& checks) {
  return std::ranges::all_of(checks, [](const VerifyCheck& check) { return check.passed; });
}

}  // namespace annulus::cli
