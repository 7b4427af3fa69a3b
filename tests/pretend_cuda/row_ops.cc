// What pretend GPUs do with rows and bytes beside attention (row_ops.h, copy_blocks.h).
#include "kernels/cuda/row_ops.h"

#include "kernels/cuda/copy_blocks.h"
#include "pretend_cuda/rows.h"

namespace annulus::cuda {
namespace {

std::int64_t at(const ConstTensorView& view, std::int64_t b, std::int64_t i, std::int64_t h) {
  return b * view.stride[0] + i * view.stride[1] + h * view.stride[2];
}

// f(batch, row, head) of a tensor's shape, on the stream.
template <class F>
void for_each_row(cudaStream_t stream, const ConstTensorView& shape, F f) {
  queue_on(stream, [=] {
    for (std::int64_t b = 0; b < shape.shape[0]; ++b)
      for (std::int64_t i = 0; i < shape.shape[1]; ++i)
        for (std::int64_t h = 0; h < shape.shape[2]; ++h) f(b, i, h);
  });
}

std::vector<float> row_of(const ConstTensorView& view, std::int64_t b, std::int64_t i, std::int64_t h) {
  std::vector<float> row(static_cast<std::size_t>(view.shape[3]));
  load_row(row.data(), view.data, at(view, b, i, h), view.shape[3], view.dtype);
  return row;
}

template <class List>
void copy_list(const List& list, cudaStream_t stream) {
  queue_on(stream, [blocks = std::vector(list.blocks, list.blocks + list.count)] {
    const auto divide = [](std::uint32_t n, const Divisor& by) {
      return static_cast<std::uint32_t>(std::uint64_t{n} * by.factor >> by.shift);
    };
    const auto here = [](auto* address) {  // pinned memory is the host's own
      auto* const found = support::WalledBytes::reach(address);
      return found != nullptr ? found : address;
    };
    for (const CopiedBlock& block : blocks) {
      const std::byte* const source = here(block.from);
      std::byte* to = here(block.to);
      const std::size_t bytes = std::size_t{1} << block.unit_log2;
      for (std::uint32_t unit = 0; unit < block.units; ++unit, to += bytes) {
        std::uint32_t row = divide(unit, block.run);
        std::int64_t from = std::int64_t{unit - row * block.run.value} << block.unit_log2;
        for (int axis = 3; axis > 0; --axis) {
          const std::uint32_t outer = divide(row, block.counts[axis - 1]);
          from += block.stride_bytes[axis] * (row - outer * block.counts[axis - 1].value);
          row = outer;
        }
        const std::byte* const begin = source + from + block.stride_bytes[0] * row;
        pretend::require_aligned(begin, static_cast<std::int64_t>(bytes));
        pretend::require_aligned(to, static_cast<std::int64_t>(bytes));
        std::copy_n(begin, bytes, to);
      }
    }
  });
}

}  // namespace

namespace ops {

void copy(const ConstTensorView& from, const TensorView& to, cudaStream_t stream) {
  for_each_row(stream, to, [=](auto b, auto i, auto h) {
    store_row(to.data, at(to, b, i, h), row_of(from, b, i, h).data(), 1.0f, to.shape[3], to.dtype);
  });
}
void add(const ConstTensorView& source, const TensorView& target, cudaStream_t stream) {
  for_each_row(stream, target, [=](auto b, auto i, auto h) {
    std::vector<float> sum = row_of(target, b, i, h);
    cuda::add(sum.data(), 1.0f, row_of(source, b, i, h).data(), target.shape[3]);
    store_row(target.data, at(target, b, i, h), sum.data(), 1.0f, target.shape[3], DType::fp32);
  });
}
void round(const ConstTensorView& source, float factor, const TensorView& target, cudaStream_t stream) {
  for_each_row(stream, target, [=](auto b, auto i, auto h) {
    store_row(target.data, at(target, b, i, h), row_of(source, b, i, h).data(), factor, target.shape[3], target.dtype);
  });
}
void clear(const TensorView& target, cudaStream_t stream) {
  for_each_row(stream, target, [=](auto b, auto i, auto h) {
    const std::vector<float> zeros(static_cast<std::size_t>(target.shape[3]), 0.0f);
    store_row(target.data, at(target, b, i, h), zeros.data(), 1.0f, target.shape[3], DType::fp32);
  });
}
void scale_maxima(float2* sums, std::int64_t count, float factor, cudaStream_t stream) {
  queue_on(stream, [=] {
    for (std::int64_t i = 0; i < count; ++i) pretend::reached(sums)[i].x *= factor;
  });
}
void merge(const ConstTensorView& out, const ConstTensorView& lse, const States& states, std::int64_t head,
           const Rows& rows, cudaStream_t stream) {
  for_each_row(stream, out, [=](auto b, auto i, auto h) {
    const float x = row_of(lse, b, i, h)[0] * 1.442695040888963407f;
    if (x == -INFINITY) return;
    const std::int64_t row = (b * states.heads + head) * states.rows + rows.first + i * rows.stride;
    float2& sums = pretend::reached(states.sums)[row];
    const float now = sums.y == 0.0f ? x : std::max(sums.x, x);
    const float shrink = sums.y == 0.0f ? 0.0f : std::exp2(sums.x - now), weight = std::exp2(x - now);
    std::vector<float> values(static_cast<std::size_t>(out.shape[3]), 0.0f);
    if (sums.y != 0.0f) load_row(values.data(), states.values, row * out.shape[3], out.shape[3], DType::fp32);
    for (float& value : values) value *= shrink;
    cuda::add(values.data(), weight, row_of(out, b, i, h).data(), out.shape[3]);
    store_row(states.values, row * out.shape[3], values.data(), 1.0f, out.shape[3], DType::fp32);
    sums = {now, sums.y * shrink + weight};
  });
}
void finish(const States& states, float scale, const TensorView& out, float* lse, cudaStream_t stream) {
  for_each_row(stream, out, [=](auto b, auto i, auto h) {
    const std::int64_t row = (b * states.heads + h) * states.rows + i;
    const float2 sums = pretend::reached(states.sums)[row];
    std::vector<float> values(static_cast<std::size_t>(out.shape[3]), 0.0f);
    if (sums.y != 0.0f) load_row(values.data(), states.values, row * out.shape[3], out.shape[3], DType::fp32);
    store_row(out.data, at(out, b, i, h), values.data(), sums.y == 0.0f ? 0.0f : scale / sums.y, out.shape[3],
              out.dtype);
    if (lse != nullptr)
      pretend::reached(lse)[row] = sums.y == 0.0f ? -INFINITY : 0.693147180559945309f * (sums.x + std::log2(sums.y));
  });
}
void dot(const ConstTensorView& dout, const ConstTensorView& out, float factor, float* delta, cudaStream_t stream) {
  for_each_row(stream, dout, [=](auto b, auto i, auto h) {
    const float sum = cuda::dot(row_of(dout, b, i, h).data(), row_of(out, b, i, h).data(), dout.shape[3]);
    pretend::reached(delta)[(b * dout.shape[2] + h) * dout.shape[1] + i] = sum * factor;
  });
}
void reorder(const float* from, std::int64_t heads, std::int64_t tokens, const SumLayout& layout, float* to,
             cudaStream_t stream) {
  queue_on(stream, [=] {
    for (std::int64_t i = 0; i < heads * tokens; ++i)
      pretend::reached(to)[i / tokens * layout.rows + layout.row(static_cast<int>(i % tokens))] =
          pretend::reached(from)[i];
  });
}
void add_sums(const float* sums, const SumLayout& layout, const TensorView& target, cudaStream_t stream) {
  for_each_row(stream, target, [=](auto b, auto i, auto h) {
    const std::int64_t width = target.shape[3];
    std::vector<float> row = row_of(target, b, i, h);
    for (std::int64_t e = 0; e < width; ++e)
      row[static_cast<std::size_t>(e)] +=
          pretend::reached(sums)[(b * target.shape[2] + h) * layout.rows * width +
                                 sum_place(layout, layout.row(static_cast<int>(i)), width, e)];
    store_row(target.data, at(target, b, i, h), row.data(), 1.0f, width, DType::fp32);
  });
}

}  // namespace ops

void load_copy_kernels() {}
void launch_copy(const FewBlocks& list, std::uint32_t, cudaStream_t stream) { copy_list(list, stream); }
void launch_copy(const ManyBlocks& list, std::uint32_t, cudaStream_t stream) { copy_list(list, stream); }

}  // namespace annulus::cuda
