#include "cli/grid.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "annulus/pattern.h"
#include "annulus/tensor.h"
#include "cli/random.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

struct Sequence {
  const char* tokens;
  const char* cu_seqlens;  // nullptr: one document
};

struct Branches {
  const char* segments;
  const char* dilations;
};

struct Heads {
  int query;
  int key;
};

constexpr std::array<Sequence, 6> kSequences{{{"1", nullptr},
                                              {"2", nullptr},
                                              {"127", nullptr},
                                              {"1000", nullptr},
                                              {"4099", nullptr},
                                              {"351", "0,1,1,18,351"}}};  // documents of 1, 0, 17 and 333 tokens
constexpr std::array<Branches, 5> kBranches{
    {{"16", "1"}, {"16,64,100", "1,3,7"}, {"2048,4096", "1,2"}, {"64,128,256,512,1024", "1,2,4,8,16"}, {"10", "16"}}};
constexpr std::array<Heads, 3> kHeads{{{1, 1}, {5, 1}, {12, 4}}};
constexpr std::array<const char*, 6> kHeadDims{"8", "40", "64", "80", "128", "256"};
constexpr std::array<Phase, 4> kPhases{Phase::by_head, Phase::by_head_block, Phase::every, Phase::table};
constexpr std::array<DType, 3> kDTypes{DType::fp32, DType::bf16, DType::fp16};
constexpr std::array<Gradient, 2> kGradients{Gradient::exact, Gradient::detached};
constexpr std::array<bool, 2> kCausal{false, true};

constexpr std::size_t kCases = kSequences.size() * kBranches.size() * kHeads.size() * kHeadDims.size() *
                               kPhases.size() * kDTypes.size() * kGradients.size() * kCausal.size();

constexpr double kCheapCost = 2e7;  // a tenth of a second, mostly the reference's

// Any class for any head, the same ones every time.
std::string class_table(const Branches& branches, int heads, std::uint32_t salt) {
  std::string text;
  std::uint32_t branch = 0;
  for (const std::int64_t dilation : parse_sizes(branches.dilations)) {
    if (branch > 0) text += ";";
    for (int head = 0; head < heads; ++head) {
      const std::uint32_t bits = philox4x32({branch, static_cast<std::uint32_t>(head), salt, 0}, {0, 0})[0];
      text += (head > 0 ? "," : "") + std::to_string(bits % static_cast<std::uint32_t>(dilation));
    }
    ++branch;
  }
  return text;
}

struct Case {
  std::size_t index = 0;
  bool causal = false;
  Gradient gradient = Gradient::exact;
  DType dtype = DType::fp32;
  Phase phase = Phase::by_head;
  const char* head_dim = nullptr;
  Heads heads{};
  Branches branches{};
  Sequence sequence{};
};

// `index` read as digits in mixed radix: causal varies fastest, the sequence slowest.
Case make_case(std::size_t index) {
  std::size_t rest = index;
  const auto choose = [&](const auto& table) {
    const auto& choice = table[rest % table.size()];
    rest /= table.size();
    return choice;
  };
  Case result;
  result.index = index;
  result.causal = choose(kCausal);
  result.gradient = choose(kGradients);
  result.dtype = choose(kDTypes);
  result.phase = choose(kPhases);
  result.head_dim = choose(kHeadDims);
  result.heads = choose(kHeads);
  result.branches = choose(kBranches);
  result.sequence = choose(kSequences);
  return result;
}

Words words_of(const Case& from) {
  Words words = {"--tokens",    from.sequence.tokens,
                 "--heads",     std::to_string(from.heads.query),
                 "--kv-heads",  std::to_string(from.heads.key),
                 "--head-dim",  from.head_dim,
                 "--dtype",     std::string(name(from.dtype)),
                 "--segments",  from.branches.segments,
                 "--dilations", from.branches.dilations,
                 "--phase",     std::string(name(from.phase)),
                 "--gradient",  std::string(name(from.gradient))};
  if (from.phase == Phase::table) {
    words.emplace_back("--classes");
    words.push_back(class_table(from.branches, from.heads.query, static_cast<std::uint32_t>(from.index)));
  }
  if (from.causal) words.emplace_back("--causal");
  if (from.sequence.cu_seqlens != nullptr) {
    words.emplace_back("--cu-seqlens");
    words.emplace_back(from.sequence.cu_seqlens);
  }
  return words;
}

// Products to be summed, about: pairs times head size.
double cost_of(const Case& from) {
  const auto tokens = static_cast<double>(parse_size(from.sequence.tokens));
  const std::vector<std::int64_t> segments = parse_sizes(from.branches.segments);
  const std::vector<std::int64_t> dilations = parse_sizes(from.branches.dilations);
  double keys = 0;
  for (std::size_t i = 0; i < segments.size(); ++i)
    keys += std::min(tokens, static_cast<double>(segments[i])) / static_cast<double>(dilations[i]);
  return tokens * keys * from.heads.query * static_cast<double>(parse_size(from.head_dim));
}

// A weighted choice without replacement: every case waits an exponential time whose rate is its weight, the first ones
// win. The waits come from the counter-based generator, so the same seed chooses the same cases everywhere.
std::vector<Case> choose_cases(const std::vector<Case>& cases, std::int64_t samples, std::uint64_t seed) {
  std::vector<std::pair<double, std::size_t>> waits;
  for (const Case& one : cases) {
    const PhiloxKey key = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    const std::uint32_t bits = philox4x32({static_cast<std::uint32_t>(one.index), 0, 0, 1}, key)[0];
    const double slowness = std::sqrt(std::max(cost_of(one), kCheapCost));
    waits.emplace_back(-std::log((bits + 0.5) * 0x1p-32) * slowness, one.index);
  }
  std::ranges::sort(waits);
  waits.resize(std::min(waits.size(), static_cast<std::size_t>(samples)));
  std::vector<Case> chosen;
  for (const auto& [wait, index] : waits) chosen.push_back(make_case(index));
  return chosen;
}

bool has(const Words& words, const Words& wanted) { return !std::ranges::search(words, wanted).empty(); }

std::vector<Case> cases_with(const std::vector<Words>& wanted) {
  std::vector<Case> cases;
  for (std::size_t index = 0; index < kCases; ++index) {
    const Case one = make_case(index);
    const Words words = words_of(one);
    if (std::ranges::all_of(wanted, [&](const Words& option) { return has(words, option); })) cases.push_back(one);
  }
  return cases;
}

}  // namespace

std::vector<Words> grid_cases(const std::vector<Words>& wanted, std::optional<std::int64_t> samples,
                              std::uint64_t seed) {
  const std::vector<Case> cases = cases_with(wanted);
  std::vector<Words> words;
  for (const Case& one : samples ? choose_cases(cases, *samples, seed) : cases) words.push_back(words_of(one));
  return words;
}

std::string command_line(const Words& words) {
  std::string text = "annulus verify";
  for (const std::string& word : words) text += word.find(';') == std::string::npos ? " " + word : " '" + word + "'";
  return text;
}

}  // namespace annulus::cli
