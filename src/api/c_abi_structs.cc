#include "api/c_abi_structs.h"

#include <array>
#include <cstdio>
#include <cstring>

namespace annulus {
namespace {

static_assert(ANNULUS_FP32 == static_cast<int>(DType::fp32) && ANNULUS_BF16 == static_cast<int>(DType::bf16) &&
              ANNULUS_FP16 == static_cast<int>(DType::fp16));
static_assert(ANNULUS_PRESET_LONGNET == static_cast<int>(Preset::longnet) &&
              ANNULUS_PRESET_TORCHSCALE == static_cast<int>(Preset::torchscale) &&
              ANNULUS_PRESET_RESIDUE == static_cast<int>(Preset::residue) &&
              ANNULUS_PRESET_HEAD_GROUPS == static_cast<int>(Preset::head_groups));
// These two have a default in front.
static_assert(ANNULUS_PHASE_BY_HEAD == static_cast<int>(Phase::by_head) + 1 &&
              ANNULUS_PHASE_BY_HEAD_BLOCK == static_cast<int>(Phase::by_head_block) + 1 &&
              ANNULUS_PHASE_EVERY == static_cast<int>(Phase::every) + 1 &&
              ANNULUS_PHASE_TABLE == static_cast<int>(Phase::table) + 1);
static_assert(ANNULUS_GRADIENT_EXACT == static_cast<int>(Gradient::exact) + 1 &&
              ANNULUS_GRADIENT_DETACHED == static_cast<int>(Gradient::detached) + 1);
static_assert(ANNULUS_FORWARD == static_cast<int>(Pass::forward) &&
              ANNULUS_BACKWARD == static_cast<int>(Pass::backward));

DType to_dtype(int value) { return checked_enum<DType>("dtype", value, ANNULUS_FP32, ANNULUS_FP16); }

void take_heads(const annulus_branch& from, Preset preset, Branch& branch) {
  if (from.head_count < 0)
    throw InvalidArgument("head_count must not be negative; got " + std::to_string(from.head_count) +
                          ": use 0 for all heads");
  const auto classes = checked_list(from.classes, from.class_count, "classes");
  if (preset == Preset::head_groups) {
    if (from.first_head != 0 || from.head_count != 0 || !classes.empty())
      throw InvalidArgument(
          "the preset head_groups deals heads and classes itself; got some in a branch: leave them 0");
    return;
  }
  branch.first_head = from.first_head;
  if (from.head_count != 0) branch.head_count = from.head_count;
  branch.classes.assign(classes.begin(), classes.end());
}

Pattern to_pattern(const annulus_problem& problem) {
  const auto branches = checked_list(problem.branches, problem.branch_count, "branches");
  const auto preset =
      checked_enum<Preset>("preset", problem.preset, ANNULUS_PRESET_LONGNET, ANNULUS_PRESET_HEAD_GROUPS);
  std::vector<std::int64_t> segments, dilations;
  for (const annulus_branch& branch : branches) {
    segments.push_back(branch.segment);
    dilations.push_back(branch.dilation);
  }
  Pattern pattern = make_pattern(preset, segments, dilations, problem.heads);
  for (std::size_t i = 0; i < branches.size(); ++i) take_heads(branches[i], preset, pattern.branches[i]);
  if (problem.phase != ANNULUS_PHASE_DEFAULT) {
    if (preset == Preset::head_groups)
      throw InvalidArgument("the preset head_groups has its own phases; got phase " + std::to_string(problem.phase) +
                            ": leave it ANNULUS_PHASE_DEFAULT");
    pattern.phase = checked_enum<Phase>("phase", problem.phase, ANNULUS_PHASE_BY_HEAD, ANNULUS_PHASE_TABLE);
  }
  if (problem.gradient != ANNULUS_GRADIENT_DEFAULT)
    pattern.gradient =
        checked_enum<Gradient>("gradient", problem.gradient, ANNULUS_GRADIENT_EXACT, ANNULUS_GRADIENT_DETACHED);
  if (problem.output_scale != nullptr) pattern.output_scale = *problem.output_scale;
  pattern.pad_like_torchscale = problem.pad_like_torchscale != 0;
  return pattern;
}

TensorView to_view(const annulus_tensor& tensor) {
  std::array<std::int64_t, 4> shape{}, stride{};
  std::copy_n(tensor.shape, 4, shape.begin());
  std::copy_n(tensor.stride, 4, stride.begin());
  const DType dtype = to_dtype(tensor.dtype);
  const bool dense = std::all_of(stride.begin(), stride.end(), [](std::int64_t s) { return s == 0; });
  return dense ? TensorView(tensor.data, dtype, shape) : TensorView(tensor.data, dtype, shape, stride);
}

std::span<std::byte> to_workspace(void* workspace, std::size_t bytes) {
  return checked_buffer(static_cast<std::byte*>(workspace), bytes, "workspace");
}

}  // namespace

Pass to_pass(int value) { return checked_enum<Pass>("pass", value, ANNULUS_FORWARD, ANNULUS_BACKWARD); }

Problem to_problem(const annulus_problem& from) {
  Problem problem;
  problem.batch = from.batch;
  problem.tokens = from.tokens;
  problem.heads = from.heads;
  problem.kv_heads = from.kv_heads;
  problem.head_dim = from.head_dim;
  problem.dtype = to_dtype(from.dtype);
  problem.pattern = to_pattern(from);
  problem.causal = from.causal != 0;
  if (from.scale != nullptr) problem.scale = *from.scale;
  const auto documents = checked_list(from.documents, from.document_bounds, "documents");
  problem.documents.assign(documents.begin(), documents.end());
  return problem;
}

Options to_options(const annulus_options* from) {
  if (from == nullptr) return {};
  const annulus_options& given = checked_struct(from, "options");
  if (given.deterministic != 0 && given.deterministic != 1)
    throw InvalidArgument("deterministic of annulus_options must be 0 or 1; got " +
                          std::to_string(given.deterministic) + ": start from a struct of zeros");
  Options options;
  options.threads = given.threads;
  if (given.instruction_set != nullptr) options.instruction_set = given.instruction_set;
  if (given.device != nullptr) options.device = given.device;
  options.deterministic = given.deterministic != 0;
  return options;
}

ForwardArgs to_args(const annulus_forward_args& from) {
  return {.q = to_view(from.q),
          .k = to_view(from.k),
          .v = to_view(from.v),
          .out = to_view(from.out),
          .lse = checked_buffer(from.lse, from.lse_count, "lse"),
          .workspace = to_workspace(from.workspace, from.workspace_bytes),
          .stream = from.stream};
}

BackwardArgs to_args(const annulus_backward_args& from) {
  return {.q = to_view(from.q),
          .k = to_view(from.k),
          .v = to_view(from.v),
          .out = to_view(from.out),
          .lse = checked_buffer(from.lse, from.lse_count, "lse"),
          .dout = to_view(from.dout),
          .dq = to_view(from.dq),
          .dk = to_view(from.dk),
          .dv = to_view(from.dv),
          .workspace = to_workspace(from.workspace, from.workspace_bytes),
          .stream = from.stream};
}

void copy_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* length) {
  if (capacity > 0) deref(buffer, "buffer", "pass a buffer, or a capacity of 0");
  if (length != nullptr) *length = text.size();
  if (capacity == 0) return;
  const std::size_t fits = std::min(capacity - 1, text.size());
  std::memcpy(buffer, text.data(), fits);
  buffer[fits] = '\0';
}

void copy_components(const std::vector<MemoryComponent>& all, annulus_memory_component* components,
                     std::size_t capacity, std::size_t* count) {
  std::size_t& result = deref(count, "count", "pass the address of a size_t");
  if (capacity > 0) deref(components, "components", "pass an array, or a capacity of 0");
  result = all.size();
  for (std::size_t i = 0; i < std::min(capacity, all.size()); ++i) {
    std::snprintf(components[i].name, sizeof components[i].name, "%s", all[i].name.c_str());
    components[i].bytes = all[i].bytes;
  }
}

}  // namespace annulus
