#include "annulus/pattern.h"

#include <string>

#include "annulus/errors.h"
#include "annulus/tensor.h"
#include "plan/names.h"

namespace annulus {
namespace {

constexpr NameTable<Phase, 4> kPhases{{{Phase::by_head, "by_head"},
                                       {Phase::by_head_block, "by_head_block"},
                                       {Phase::every, "every"},
                                       {Phase::table, "table"}}};
constexpr NameTable<Gradient, 2> kGradients{{{Gradient::exact, "exact"}, {Gradient::detached, "detached"}}};
constexpr NameTable<Preset, 4> kPresets{{{Preset::longnet, "longnet"},
                                         {Preset::torchscale, "torchscale"},
                                         {Preset::residue, "residue"},
                                         {Preset::head_groups, "head_groups"}}};
constexpr NameTable<DType, 3> kDTypes{{{DType::fp32, "fp32"}, {DType::bf16, "bf16"}, {DType::fp16, "fp16"}}};

// Head j in exactly one branch: branch i takes heads / m heads, one more for the first heads % m branches, in order.
void deal_heads(Pattern& pattern, std::int64_t heads) {
  const auto branch_count = static_cast<std::int64_t>(pattern.branches.size());
  if (branch_count > heads)
    throw InvalidArgument("the preset head_groups needs at least one head a branch; got " +
                          std::to_string(branch_count) + " branches and " + std::to_string(heads) +
                          " heads: use fewer branches or another preset");
  std::int64_t first = 0;
  for (std::int64_t i = 0; i < branch_count; ++i) {
    Branch& branch = pattern.branches[static_cast<std::size_t>(i)];
    branch.first_head = first;
    branch.head_count = heads / branch_count + (i < heads % branch_count ? 1 : 0);
    // A dilation below 1 is refused by resolve(), with a better message than a division by zero.
    const std::int64_t phase_class = branch.dilation >= 1 ? i % branch.dilation : 0;
    branch.classes.assign(static_cast<std::size_t>(branch.head_count), phase_class);
    first += branch.head_count;
  }
  pattern.phase = Phase::table;
  pattern.output_scale = 1.0 / static_cast<double>(branch_count);
}

}  // namespace

Pattern make_pattern(Preset preset, const std::vector<std::int64_t>& segment_lengths,
                     const std::vector<std::int64_t>& dilations, std::int64_t heads) {
  if (segment_lengths.size() != dilations.size())
    throw InvalidArgument("segment lengths and dilations are one each per branch; got " +
                          std::to_string(segment_lengths.size()) + " segment lengths and " +
                          std::to_string(dilations.size()) + " dilations: give as many of the one as of the other");
  if (segment_lengths.empty())
    throw InvalidArgument("a pattern has at least one branch; got none: give segment lengths and dilations");
  Pattern pattern;
  for (std::size_t i = 0; i < segment_lengths.size(); ++i) {
    Branch branch;
    branch.segment = segment_lengths[i];
    branch.dilation = dilations[i];
    pattern.branches.push_back(branch);
  }
  switch (preset) {
    case Preset::longnet:
      break;
    case Preset::torchscale:
      pattern.phase = Phase::by_head_block;
      pattern.gradient = Gradient::detached;
      break;
    case Preset::residue:
      pattern.phase = Phase::every;
      break;
    case Preset::head_groups:
      deal_heads(pattern, heads);
      break;
  }
  return pattern;
}

std::string_view name(Phase phase) { return find_name(kPhases, phase); }
std::string_view name(Gradient gradient) { return find_name(kGradients, gradient); }
std::string_view name(Preset preset) { return find_name(kPresets, preset); }
std::string_view name(DType dtype) { return find_name(kDTypes, dtype); }

Phase parse_phase(std::string_view text) { return find_value(kPhases, "the phase rule", text); }
Gradient parse_gradient(std::string_view text) { return find_value(kGradients, "the gradient", text); }
Preset parse_preset(std::string_view text) { return find_value(kPresets, "the preset", text); }
DType parse_dtype(std::string_view text) { return find_value(kDTypes, "the dtype", text); }

}  // namespace annulus
