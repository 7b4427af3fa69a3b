// The pattern: which keys a query attends to (docs/semantics.md, sections 2 to 5).
//
// A pattern is a list of branches. A branch cuts the sequence into segments of `segment` positions and lets a query
// see the keys of its own class, that is every `dilation`-th position of its segment. The phase rule says which
// classes take part in which head.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace annulus {

inline constexpr std::int64_t kAllHeads = -1;

struct Branch {
  std::int64_t segment = 0;             // w >= 1
  std::int64_t dilation = 1;            // r >= 1
  std::int64_t first_head = 0;          // the heads that take part: [first_head, first_head + head_count)
  std::int64_t head_count = kAllHeads;  // kAllHeads: up to the last head
  std::vector<std::int64_t> classes;    // Phase::table only: the class of head first_head + i, one entry a head

  bool operator==(const Branch&) const = default;
};

enum class Phase {
  by_head,        // class j mod r of head j: the LongNet paper
  by_head_block,  // class floor(j / ceil(H / r)): torchscale
  every,          // every class: a query sees the keys of its own class
  table,          // Branch::classes
};

enum class Gradient {
  exact,     // eq. 7: through the merge of the branches
  detached,  // eq. 8: merge weights are constants, as torchscale trains
};

enum class Preset { longnet, torchscale, residue, head_groups };

struct Pattern {
  std::vector<Branch> branches;
  Phase phase = Phase::by_head;
  Gradient gradient = Gradient::exact;
  double output_scale = 1.0;         // out = output_scale * eq. 5; `head_groups` uses 1 / branches
  bool pad_like_torchscale = false;  // zero keys in a short last segment, non-causal only

  bool operator==(const Pattern&) const = default;
};

// Branch i has segment_lengths[i] and dilations[i]; both lists have the same length. `heads` matters to `head_groups`
// alone.
Pattern make_pattern(Preset preset, const std::vector<std::int64_t>& segment_lengths,
                     const std::vector<std::int64_t>& dilations, std::int64_t heads);

std::string_view name(Phase phase);
std::string_view name(Gradient gradient);
std::string_view name(Preset preset);

// The inverse of `name`; throws InvalidArgument that lists the known names.
Phase parse_phase(std::string_view text);
Gradient parse_gradient(std::string_view text);
Preset parse_preset(std::string_view text);

}  // namespace annulus
