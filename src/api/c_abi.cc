// The C ABI over annulus::Attention: reads C structs into the C++ ones and lets those do all the checking that is not
// about C itself (null pointers, struct sizes, enumerators that came as integers).
#include "annulus/annulus.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <new>
#include <span>
#include <string>

#include "annulus/attention.h"
#include "api/c_status.h"

struct annulus_attention {
  annulus::Attention attention;
};

namespace annulus {
namespace {

constexpr std::size_t kLargestStruct = 4096;

// Fixed, so that even running out of memory can be told.
std::array<char, 1024>& thread_message() {
  thread_local std::array<char, 1024> message{};
  return message;
}

int record(int status, const char* message) noexcept {
  std::snprintf(thread_message().data(), thread_message().size(), "%s", message);
  return status;
}

template <class T>
T& deref(T* pointer, const char* name, const char* remedy) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " must not be null; got null: " + remedy);
  return *pointer;
}

const Attention& deref(const annulus_attention* handle) {
  return deref(handle, "attention", "make one with annulus_create").attention;
}

// A struct of a later version may be longer; that is fine as long as it asks for nothing we do not know.
template <class Struct>
const Struct& checked_struct(const Struct* pointer, const char* name) {
  const std::string type = std::string("annulus_") + name;
  const Struct& value = deref(pointer, name, ("pass a pointer to an " + type).c_str());
  if (value.struct_size < sizeof(Struct) || value.struct_size > kLargestStruct)
    throw InvalidArgument("struct_size of " + type + " must be at least " + std::to_string(sizeof(Struct)) + "; got " +
                          std::to_string(value.struct_size) + ": set it to sizeof(" + type + ")");
  const auto* bytes = reinterpret_cast<const unsigned char*>(pointer);
  if (!std::all_of(bytes + sizeof(Struct), bytes + value.struct_size, [](unsigned char byte) { return byte == 0; }))
    throw Unsupported("fields of " + type + " behind byte " + std::to_string(sizeof(Struct)) +
                      " must be 0 in version " ANNULUS_VERSION "; got a value there: use a newer library");
  return value;
}

template <class T>
std::span<const T> checked_list(const T* pointer, std::int64_t count, const char* name) {
  if (count < 0 || (count > 0 && pointer == nullptr))
    throw InvalidArgument(std::string(name) + " must be a pointer and the number of its elements; got " +
                          (pointer == nullptr ? "null" : "a pointer") + " and " + std::to_string(count) +
                          ": pass both, or null and 0");
  return {pointer, static_cast<std::size_t>(count)};
}

// Buffers come with their size, or not at all: half of it is a slip that must not pass as "none".
template <class T>
std::span<T> checked_buffer(T* pointer, std::size_t count, const char* name) {
  if ((pointer == nullptr) != (count == 0))
    throw InvalidArgument(std::string(name) + " must be a pointer and its size; got " +
                          (pointer == nullptr ? "null" : "a pointer") + " and " + std::to_string(count) +
                          ": pass both, or null and 0");
  return {pointer, count};
}

template <class Enum>
Enum checked_enum(const char* name, int value, int first, int last) {
  if (value < first || value > last)
    throw InvalidArgument(std::string(name) + " must be from " + std::to_string(first) + " to " + std::to_string(last) +
                          "; got " + std::to_string(value) + ": use one of enum annulus_" + name);
  return static_cast<Enum>(value - first);
}

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
Pass to_pass(int value) { return checked_enum<Pass>("pass", value, ANNULUS_FORWARD, ANNULUS_BACKWARD); }

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

int record_exception() noexcept {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    return record(ANNULUS_INVALID_ARGUMENT, error.what());
  } catch (const Unsupported& error) {
    return record(ANNULUS_UNSUPPORTED, error.what());
  } catch (const OutOfMemory& error) {
    return record(ANNULUS_OUT_OF_MEMORY, error.what());
  } catch (const DeviceError& error) {
    return record(ANNULUS_DEVICE_ERROR, error.what());
  } catch (const TransportError& error) {
    return record(ANNULUS_TRANSPORT_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return record(ANNULUS_OUT_OF_MEMORY, "the system has no more memory: use fewer threads or free some");
  } catch (const std::exception& error) {
    return record(ANNULUS_INTERNAL, error.what());
  } catch (...) {
    return record(ANNULUS_INTERNAL, "an exception of unknown type: please report it");
  }
}

}  // namespace annulus

using namespace annulus;  // NOLINT(google-build-using-namespace): what follows is C

extern "C" {

const char* annulus_version(void) { return ANNULUS_VERSION; }

const char* annulus_last_error(void) { return thread_message().data(); }

int annulus_create(const annulus_problem* problem, const annulus_options* options, annulus_attention** attention) {
  return as_status([&] {
    annulus_attention*& result = deref(attention, "attention", "pass the address of the handle");
    result = nullptr;
    const Problem given = to_problem(checked_struct(problem, "problem"));
    result = new annulus_attention{Attention(given, to_options(options))};
  });
}

void annulus_destroy(annulus_attention* attention) { delete attention; }

int annulus_forward(const annulus_attention* attention, const annulus_forward_args* args) {
  return as_status([&] {
    const Attention& target = deref(attention);
    const annulus_forward_args& given = checked_struct(args, "forward_args");
    target.forward({.q = to_view(given.q),
                    .k = to_view(given.k),
                    .v = to_view(given.v),
                    .out = to_view(given.out),
                    .lse = checked_buffer(given.lse, given.lse_count, "lse"),
                    .workspace = to_workspace(given.workspace, given.workspace_bytes),
                    .stream = given.stream});
  });
}

int annulus_backward(const annulus_attention* attention, const annulus_backward_args* args) {
  return as_status([&] {
    const Attention& target = deref(attention);
    const annulus_backward_args& given = checked_struct(args, "backward_args");
    target.backward({.q = to_view(given.q),
                     .k = to_view(given.k),
                     .v = to_view(given.v),
                     .out = to_view(given.out),
                     .lse = checked_buffer(given.lse, given.lse_count, "lse"),
                     .dout = to_view(given.dout),
                     .dq = to_view(given.dq),
                     .dk = to_view(given.dk),
                     .dv = to_view(given.dv),
                     .workspace = to_workspace(given.workspace, given.workspace_bytes),
                     .stream = given.stream});
  });
}

int annulus_workspace_bytes(const annulus_attention* attention, int pass, size_t* bytes) {
  return as_status([&] {
    size_t& result = deref(bytes, "bytes", "pass the address of a size_t");
    result = deref(attention).workspace_bytes(to_pass(pass));
  });
}

int annulus_explain(const annulus_attention* attention, char* buffer, size_t capacity, size_t* length) {
  return as_status([&] {
    const Attention& target = deref(attention);
    if (capacity > 0) deref(buffer, "buffer", "pass a buffer, or a capacity of 0");
    const std::string text = target.explain();
    if (length != nullptr) *length = text.size();
    if (capacity == 0) return;
    const size_t fits = std::min(capacity - 1, text.size());
    std::memcpy(buffer, text.data(), fits);
    buffer[fits] = '\0';
  });
}

int annulus_memory(const annulus_attention* attention, int pass, annulus_memory_component* components, size_t capacity,
                   size_t* count) {
  return as_status([&] {
    const Attention& target = deref(attention);
    size_t& result = deref(count, "count", "pass the address of a size_t");
    if (capacity > 0) deref(components, "components", "pass an array, or a capacity of 0");
    const std::vector<MemoryComponent> all = target.memory(to_pass(pass));
    result = all.size();
    for (size_t i = 0; i < std::min(capacity, all.size()); ++i) {
      std::snprintf(components[i].name, sizeof components[i].name, "%s", all[i].name.c_str());
      components[i].bytes = all[i].bytes;
    }
  });
}

}  // extern "C"
