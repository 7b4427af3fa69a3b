#include "api/checks.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>

#include "annulus/errors.h"

namespace annulus {
namespace {

using Sizes = std::array<std::int64_t, 4>;

std::string text(const Sizes& shape) {
  std::string result = "[";
  for (std::size_t i = 0; i < 4; ++i) result += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return result + "]";
}

bool is_empty(const Sizes& shape) { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }

void check_aligned(const char* name, const void* data, std::int64_t alignment) {
  if (reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(alignment) != 0)
    throw InvalidArgument(
        std::string(name) + " must be aligned to " + std::to_string(alignment) + " bytes; got an address " +
        std::to_string(reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(alignment)) +
        " bytes behind: move it");
}

// Elements from the first to one behind the last.
std::int64_t extent(const Sizes& shape, const Sizes& stride) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < 4; ++i) last += (shape[i] - 1) * stride[i];
  return last + 1;
}

std::array<std::size_t, 4> axes_by_stride(const Sizes& stride) {
  std::array<std::size_t, 4> axes{0, 1, 2, 3};
  std::sort(axes.begin(), axes.end(), [&](std::size_t a, std::size_t b) { return stride[a] < stride[b]; });
  return axes;
}

// Byte offsets are counted in 64 bits.
bool leaves_address_space(const Sizes& shape, const Sizes& stride) {
  long double last = 0;
  for (std::size_t i = 0; i < 4; ++i)
    last += static_cast<long double>(shape[i] - 1) * static_cast<long double>(stride[i]);
  return last > 0x1p60L;
}

// Whether two of the view's own elements may share memory: sorted by stride, each axis must step over all of the finer
// ones.
bool folds_onto_itself(const Sizes& shape, const Sizes& stride) {
  std::int64_t covered = 1;
  for (const std::size_t axis : axes_by_stride(stride)) {
    if (shape[axis] == 1) continue;
    if (stride[axis] < covered) return true;
    covered += (shape[axis] - 1) * stride[axis];
  }
  return false;
}

}  // namespace

// The finer axes fill the teeth, steps of the coarser ones are multiples of the period: one comb for each way to part
// them.
std::vector<ArgumentChecks::Comb> ArgumentChecks::combs_of(const Sizes& shape, const Sizes& stride, std::int64_t size) {
  const std::array<std::size_t, 4> axes = axes_by_stride(stride);
  std::vector<Comb> combs;
  for (std::size_t fine = 0; fine < 4; ++fine) {
    Comb comb{0, size};
    for (std::size_t i = 0; i < 4; ++i) {
      const std::int64_t steps = shape[axes[i]] - 1;
      if (steps == 0) continue;
      const std::int64_t step = stride[axes[i]] * size;
      if (i < fine)
        comb.filled += steps * step;
      else
        comb.period = std::gcd(comb.period, step);
    }
    if (comb.period >= comb.filled) combs.push_back(comb);
  }
  return combs;
}

void ArgumentChecks::view(const char* name, const ConstTensorView& view, Shape shape, bool written) {
  const Sizes wanted{problem_.batch, shape == Shape::q ? rows_.queries : rows_.keys,
                     shape == Shape::q ? problem_.heads : problem_.kv_heads, problem_.head_dim};
  if (view.shape != wanted)
    throw InvalidArgument(std::string(name) + " must have the problem's shape [batch, tokens, heads, head_dim] = " +
                          text(wanted) + "; got " + text(view.shape) + ": pass the tensor that the problem describes");
  if (view.dtype != problem_.dtype)
    throw InvalidArgument(std::string(name) + " must have the problem's dtype " +
                          std::string(annulus::name(problem_.dtype)) + "; got " +
                          std::string(annulus::name(view.dtype)) + ": convert it or change the problem");
  if (is_empty(wanted)) return;
  if (view.data == nullptr)
    throw InvalidArgument(std::string(name) + " must point to memory; got null: pass the tensor's data");
  if (view.shape[3] > 1 && view.stride[3] != 1)
    throw InvalidArgument("the elements of one head of " + std::string(name) + " must be contiguous; got a stride of " +
                          std::to_string(view.stride[3]) + ": copy the tensor");
  for (std::size_t i = 0; i < 3; ++i)
    if (view.stride[i] < 0)
      throw InvalidArgument("strides of " + std::string(name) + " must not be negative; got " + text(view.stride) +
                            ": copy the tensor");
  if (leaves_address_space(view.shape, view.stride))
    throw InvalidArgument("the last element of " + std::string(name) +
                          " must lie within 2^60 elements of the first; got strides " + text(view.stride) +
                          " for shape " + text(view.shape) + ": use smaller strides");
  check_aligned(name, view.data, size_of(view.dtype));
  if (written && folds_onto_itself(view.shape, view.stride))
    throw InvalidArgument("no two elements of the output " + std::string(name) + " may share memory; got strides " +
                          text(view.stride) + " for shape " + text(view.shape) + ": use larger strides");
  const auto* begin = static_cast<const std::byte*>(view.data);
  const std::int64_t size = size_of(view.dtype);
  regions_.push_back(
      {name, begin, begin + extent(view.shape, view.stride) * size, combs_of(view.shape, view.stride, size), written});
}

void ArgumentChecks::input(const char* name, std::span<const float> lse) { lse_rows(name, lse, false); }
void ArgumentChecks::output(const char* name, std::span<const float> lse) { lse_rows(name, lse, true); }

void ArgumentChecks::lse_rows(const char* name, std::span<const float> lse, bool written) {
  const std::int64_t wanted = problem_.batch * problem_.heads * rows_.queries;
  if (static_cast<std::int64_t>(lse.size()) != wanted)
    throw InvalidArgument(std::string(name) + " must have batch * heads * tokens = " + std::to_string(wanted) +
                          " elements; got " + std::to_string(lse.size()) + ": pass a buffer of that size");
  if (lse.empty()) return;
  check_aligned(name, lse.data(), 4);
  const auto bytes = std::as_bytes(lse);
  regions_.push_back({name, bytes.data(), bytes.data() + bytes.size(), {}, written});
}

void ArgumentChecks::workspace(std::span<const std::byte> memory, std::size_t needed) {
  if (memory.empty()) return;
  if (memory.size() < needed)
    throw InvalidArgument("the workspace must have workspace_bytes = " + std::to_string(needed) + " bytes; got " +
                          std::to_string(memory.size()) + ": pass a larger one, or none");
  check_aligned("the workspace", memory.data(), 64);
  regions_.push_back({"the workspace", memory.data(), memory.data() + memory.size(), {}, true});
}

// Tensors that take turns in one buffer, such as the q, k and v of a packed projection, lie between one another's rows.
bool ArgumentChecks::interleave(const Region& a, const Region& b) {
  for (const Comb& x : a.combs)
    for (const Comb& y : b.combs) {
      if (x.period != y.period) continue;
      const std::int64_t distance = ((b.begin - a.begin) % x.period + x.period) % x.period;
      if (x.filled <= distance && y.filled <= x.period - distance) return true;
    }
  return false;
}

void ArgumentChecks::overlaps() const {
  for (std::size_t i = 0; i < regions_.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) {
      const Region& a = regions_[j];
      const Region& b = regions_[i];
      if (!(a.written || b.written) || a.end <= b.begin || b.end <= a.begin || interleave(a, b)) continue;
      const Region& output = a.written ? a : b;
      throw InvalidArgument("an output must not overlap another tensor; got " + output.name + " in the memory of " +
                            (a.written ? b : a).name + ": give it memory of its own");
    }
}

void check(const ForwardArgs& args, const Problem& problem, const RowCounts& rows, std::size_t workspace_bytes) {
  using Shape = ArgumentChecks::Shape;
  ArgumentChecks checks(problem, rows);
  checks.input("q", args.q, Shape::q);
  checks.input("k", args.k, Shape::k);
  checks.input("v", args.v, Shape::k);
  checks.output("out", args.out, Shape::q);
  if (!args.lse.empty()) checks.output("lse", args.lse);
  checks.workspace(args.workspace, workspace_bytes);
  checks.overlaps();
}

void check(const BackwardArgs& args, const Problem& problem, const RowCounts& rows, std::size_t workspace_bytes) {
  using Shape = ArgumentChecks::Shape;
  ArgumentChecks checks(problem, rows);
  checks.input("q", args.q, Shape::q);
  checks.input("k", args.k, Shape::k);
  checks.input("v", args.v, Shape::k);
  checks.input("out", args.out, Shape::q);
  checks.input("lse", args.lse);
  checks.input("dout", args.dout, Shape::q);
  checks.output("dq", args.dq, Shape::q);
  checks.output("dk", args.dk, Shape::k);
  checks.output("dv", args.dv, Shape::k);
  checks.workspace(args.workspace, workspace_bytes);
  checks.overlaps();
}

}  // namespace annulus
