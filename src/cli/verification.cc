#include "cli/verification.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "annulus/thread_group.h"
#include "cli/collection.h"
#include "cli/workload.h"
#include "numeric/half.h"
#include "reference/reference.h"

namespace annulus::cli {
namespace {

constexpr double kGrowthWithRanks = 1.5;  // docs/semantics.md, section 7

// Whole tensors by name, as bytes.
struct Tensor {
  DType dtype = DType::fp32;
  std::vector<std::byte> bytes;
};
using Tensors = std::map<std::string, Tensor>;

template <class T>
std::vector<double> widen(const std::byte* data, std::size_t bytes) {
  std::vector<double> values(bytes / sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T element;
    std::memcpy(&element, data + i * sizeof(T), sizeof(T));
    values[i] = static_cast<double>(to_float(element));
  }
  return values;
}

std::vector<double> as_doubles(DType dtype, const void* data, std::size_t bytes) {
  const auto* start = static_cast<const std::byte*>(data);
  switch (dtype) {
    case DType::bf16:
      return widen<BFloat16>(start, bytes);
    case DType::fp16:
      return widen<Float16>(start, bytes);
    case DType::fp32:
      break;
  }
  return widen<float>(start, bytes);
}

reference::Result result_of(const Tensors& tensors) {
  const auto of = [&](const char* name) {
    const Tensor& tensor = tensors.at(name);
    return as_doubles(tensor.dtype, tensor.bytes.data(), tensor.bytes.size());
  };
  return {.out = of("out"), .lse = of("lse"), .dq = of("dq"), .dk = of("dk"), .dv = of("dv")};
}

reference::Inputs inputs_of(const Workload& work) {
  const auto of = [&](const char* name) {
    return as_doubles(work.dtype(name), work.data(name), static_cast<std::size_t>(work.bytes(name)));
  };
  return {.q = of("q"), .k = of("k"), .v = of("v"), .dout = of("dout")};
}

std::int64_t different_elements(const Tensor& a, const Tensor& b) {
  const auto size = static_cast<std::size_t>(size_of(a.dtype));
  std::int64_t different = 0;
  for (std::size_t i = 0; i < a.bytes.size(); i += size)
    different += std::memcmp(a.bytes.data() + i, b.bytes.data() + i, size) != 0 ? 1 : 0;
  return different;
}

class Verifier {
 public:
  Verifier(const Problem& problem, const VerifySettings& settings, Rank& rank,
           const std::function<void(const std::string&)>& step, Trace* trace)
      : problem_(problem),
        settings_(settings),
        rank_(rank),
        step_(step),
        trace_(trace),
        options_(options_of_rank(settings.setup, problem, true, rank)),
        holdings_(holdings_of(settings.setup, problem)),
        own_(problem, holdings_.of(rank.index())) {
    if (rank.transport.size() > 1) on_ranks_ = " on " + std::to_string(rank.transport.size()) + " ranks";
  }

  std::vector<VerifyCheck> run() {
    const int cores = rank_.neighbours.cores;
    rank_.busy([&] {
      own_.draw(settings_.seed, options_.device.threads, Pass::backward);
      if (!rank_.reports()) return;
      Workload whole(problem_);
      draw_all(whole);
      const reference::Inputs inputs = inputs_of(whole);
      step_("fp64 reference");
      exact_ = reference::exact(problem_, inputs, cores);
      step_("textbook in " + std::string(name(problem_.dtype)));
      textbook_ = reference::textbook(problem_, inputs, cores);
    });
    for (const std::string& set : settings_.instruction_sets) check_instruction_set(set);
    return checks_;
  }

 private:
  void draw_all(Workload& whole) const { whole.draw(settings_.seed, rank_.neighbours.cores, Pass::backward); }

  void check_instruction_set(const std::string& set) {
    const int threads = options_.device.threads;
    const int other_threads = threads == 1 ? 2 : 1;
    const std::string who = set + on_ranks_;
    step_(who);
    const Tensors first = compute(set, threads);
    if (rank_.reports()) {
      for (const reference::Check& check : reference::compare(problem_, result_of(first), exact_, textbook_))
        checks_.push_back({who + " against fp64", check.tensor, check.max_error, check.bound, check.passed});
    }
    if (!on_ranks_.empty()) compare_with_one_rank(first, set);
    compare_bits(first, set, threads, who + " run again");
    if (rank_.on_gpu()) return;  // its threads are not ours to choose
    compare_bits(first, set, other_threads,
                 who + " with " + std::to_string(other_threads) + (other_threads == 1 ? " thread" : " threads"));
  }

  void compare_bits(const Tensors& first, const std::string& set, int threads, const std::string& what) {
    step_(what);
    const Tensors again = compute(set, threads);
    if (rank_.reports()) add_bit_checks(what, first, again);
  }

  void add_bit_checks(const std::string& what, const Tensors& a, const Tensors& b) {
    for (const std::string& name : result_names(Pass::backward)) {
      if (name == "dq" && !has_fixed_dq()) continue;
      const std::int64_t different = different_elements(a.at(name), b.at(name));
      checks_.push_back({what, name, static_cast<double>(different), 0, different == 0});
    }
  }

  // A GPU may add up dq in any order.
  bool has_fixed_dq() const { return !rank_.on_gpu() || options_.device.deterministic || options_.reproducible; }

  // The error of this many ranks beside that of one, which rank 0 computes alone.
  void compare_with_one_rank(const Tensors& ours, const std::string& set) {
    const std::string what = set + on_ranks_ + " against one rank";
    step_(what);
    rank_.busy([&] {
      if (!rank_.reports()) return;
      const Tensors alone = compute_alone(set);
      if (options_.reproducible) return add_bit_checks(what, ours, alone);
      const auto our_errors = reference::compare(problem_, result_of(ours), exact_, textbook_);
      const auto errors = reference::compare(problem_, result_of(alone), exact_, textbook_);
      const auto yardstick = reference::compare(problem_, textbook_, exact_, textbook_);
      for (std::size_t i = 0; i < errors.size(); ++i) {
        const double atol = yardstick[i].bound - 2 * yardstick[i].max_error;
        const double bound = kGrowthWithRanks * errors[i].max_error + atol;
        checks_.push_back({what, errors[i].tensor, our_errors[i].max_error, bound, our_errors[i].max_error <= bound});
      }
    });
  }

  Tensors compute_alone(const std::string& set) const {
    auto group = make_thread_group(1);
    RankOptions options;
    options.device = options_.device;
    options.device.instruction_set = set;
    options.reproducible = options_.reproducible;
    if (!rank_.on_gpu()) options.device.threads = rank_.neighbours.cores;
    const RankAttention attention(problem_, {}, *group.front(), options);
    Workload work(problem_);
    work.compute_on(rank_.device, *group.front());  // somebody else answers for this rank meanwhile
    draw_all(work);
    work.forward(attention);
    work.backward(attention);
    Tensors tensors;
    for (const std::string& name : result_names(Pass::backward)) {
      const auto* start = static_cast<const std::byte*>(work.data(name));
      tensors[name] = {work.dtype(name), {start, start + work.bytes(name)}};
    }
    return tensors;
  }

  // The results of all ranks, on rank 0.
  Tensors compute(const std::string& set, int threads) {
    RankOptions options = options_;
    options.device.threads = threads;
    options.device.instruction_set = set;
    const RankAttention attention(problem_, settings_.setup.sharding, rank_.transport, options);
    Workload work(problem_, own_.holding());
    work.compute_on(rank_.device, rank_.transport);
    for (const std::string& name : input_names(Pass::backward)) work.borrow(name, own_.data(name));
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const auto begin = Trace::Clock::now();
      pass == Pass::forward ? work.forward(attention) : work.backward(attention);
      if (trace_ != nullptr) trace_->add_pass(pass, begin);
    }
    Tensors tensors;
    for (const std::string& name : result_names(Pass::backward)) {
      Tensor& tensor = tensors[name] = {work.dtype(name), {}};
      const RowShape shape = work.row_shape(name);
      const LocalRows rows{static_cast<const std::byte*>(work.data(name)), shape.outer,
                           shape.inner * size_of(tensor.dtype)};
      collect(rank_.transport, holdings_.owned(is_key_side(name)), rows, [&](std::span<const std::byte> bytes) {
        tensor.bytes.insert(tensor.bytes.end(), bytes.begin(), bytes.end());
      });
    }
    return tensors;
  }

  const Problem& problem_;
  const VerifySettings& settings_;
  Rank& rank_;
  const std::function<void(const std::string&)>& step_;
  Trace* trace_;
  RankOptions options_;
  Holdings holdings_;
  Workload own_;  // the inputs of this rank
  std::string on_ranks_;
  reference::Result exact_, textbook_;  // on rank 0
  std::vector<VerifyCheck> checks_;
};

}  // namespace

std::vector<VerifyCheck> verify(const Problem& problem, const VerifySettings& settings, Rank& rank,
                                const std::function<void(const std::string&)>& step, Trace* trace) {
  return Verifier(problem, settings, rank, step, trace).run();
}

std::int64_t verify_steps(const VerifySettings& settings) {
  const std::int64_t of_each = settings.setup.sharding.ranks > 1 ? 4 : 3;
  return 2 + of_each * static_cast<std::int64_t>(settings.instruction_sets.size());
}

std::int64_t verify_bytes(const Problem& problem) {
  // In floating point, since a problem may be as large as 64 bits allow and this is several times that.
  const double rows = static_cast<double>(problem.batch) * static_cast<double>(problem.tokens);
  const double lse = rows * static_cast<double>(problem.heads);
  const double inputs =
      2 * (lse + rows * static_cast<double>(problem.kv_heads)) * static_cast<double>(problem.head_dim);
  const double results = inputs + lse;
  // Two results of the product and those being made; inputs, exact, textbook and the product's results in fp64.
  const double bytes =
      static_cast<double>(size_of(problem.dtype)) * (2 * inputs + 3 * results) + 8 * (inputs + 3 * results);
  return static_cast<std::int64_t>(std::min(bytes, 0x1p62));
}

bool all_passed(const std::vector<VerifyCheck>& checks) {
  return std::ranges::all_of(checks, [](const VerifyCheck& check) { return check.passed; });
}

}  // namespace annulus::cli
