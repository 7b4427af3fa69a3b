// The forward kernels of a pretend GPU: what forward_kernels.h asks for, tile by tile and key by key.
#include "kernels/cuda/forward_kernels.h"

#include "pretend_cuda/rows.h"

namespace annulus::cuda {
namespace {

constexpr float kLn2 = 0.693147180559945309f;

// One row's softmax so far, in log2 units.
class Softmax {
 public:
  explicit Softmax(std::int64_t width) : values_(static_cast<std::size_t>(width), 0.0f) {}

  void load(const Launch& launch, std::int64_t row, float unit) {
    const float2 sums = pretend::reached(launch.state_sums)[row];
    seen_ = sums.x == -INFINITY;
    if (sums.y == 0.0f) return;
    m_ = sums.x * unit;
    l_ = sums.y;
    load_row(values_.data(), launch.state_values, row * launch.head_dim, launch.head_dim, DType::fp32);
  }
  void store(const Launch& launch, std::int64_t row, float unit) const {
    pretend::reached(launch.state_sums)[row] = {l_ != 0.0f ? m_ / unit : seen_ ? -INFINITY : 0.0f, l_};
    store_row(launch.state_values, row * launch.head_dim, values_.data(), 1.0f, launch.head_dim, DType::fp32);
  }
  // Null: a value of zeros.
  void meet(float x, float count, const float* value) {
    seen_ = true;
    if (x == -INFINITY) return;
    const float now = l_ == 0.0f ? x : std::max(m_, x);
    const float shrink = l_ == 0.0f ? 0.0f : std::exp2(m_ - now), weight = count * std::exp2(x - now);
    for (std::size_t e = 0; e < values_.size(); ++e)
      values_[e] = values_[e] * shrink + (value == nullptr ? 0.0f : weight * value[e]);
    l_ = l_ * shrink + weight;
    m_ = now;
  }
  // Nothing seen: 0. Seen, but all logits -inf: 0 / 0.
  void finish(const Launch& launch, DType dtype, std::int64_t batch, std::int64_t head, std::int64_t position) const {
    const bool is_nothing = l_ == 0.0f && !seen_;
    store_row(launch.out, offset(launch.out_stride, batch, head, position), values_.data(),
              is_nothing ? 0.0f : launch.output_scale / l_, launch.head_dim, dtype);
    if (launch.lse != nullptr)
      *pretend::reached(launch.lse + (batch * launch.heads + head) * launch.tokens + position) =
          l_ == 0.0f ? -INFINITY : kLn2 * (m_ + std::log2(l_));
  }

 private:
  float m_ = 0, l_ = 0;
  bool seen_ = false;  // any key
  std::vector<float> values_;
};

// `unit`: of m in the state, in log2 units.
void attend(const Launch& launch, DType dtype, float unit) {
  for_each_tile(launch, 1, [&](const Tiling& tiling, const Stretch& stretch, Tile& tile) {
    gather_parts(tiling, stretch, tiling.causal ? Sight::before : Sight::all, tile);
    const std::int64_t width = launch.head_dim;
    const Rows2d queries(launch.q, offset(launch.q_stride, tile.batch, tile.head, tile.position),
                         tile.stride * launch.q_stride.token, tile.rows, width, dtype);
    std::vector<Softmax> rows(static_cast<std::size_t>(tile.rows), Softmax(width));
    const auto state_row = [&](int i) { return tile.state_row + static_cast<std::int64_t>(tile.stride) * i; };
    for (int i = 0; tile.continues && i < tile.rows; ++i) {
      rows[static_cast<std::size_t>(i)].load(launch, state_row(i), unit);
      if (tile.is_last) pretend::reached(launch.state_sums)[state_row(i)] = {0.0f, 0.0f};
    }
    for (int b = 0; b < tile.branch_count; ++b) {
      const TileBranch& part = tile.branches[b];
      const auto rows_of = [&](const void* data, const Strides& stride) {
        return rows_of_part(data, stride, tiling, tile, part, tile.head / launch.sharers, width, dtype);
      };
      const Rows2d keys = rows_of(launch.k, launch.k_stride), values = rows_of(launch.v, launch.v_stride);
      for (int i = 0; i < tile.rows; ++i)
        for (int n = 0; n < part.keys && !(tiling.causal && n > part.first + part.step * i); ++n)
          rows[static_cast<std::size_t>(i)].meet(dot(queries[i], keys[n], width) * launch.scale_log2,
                                                 static_cast<float>(key_count(tiling, tile, part, n)), values[n]);
    }
    for (int i = 0; i < tile.rows; ++i) {
      Softmax& row = rows[static_cast<std::size_t>(i)];
      if (tile.zero_keys > 0) row.meet(0.0f, static_cast<float>(tile.zero_keys), nullptr);
      if (tile.is_last)
        row.finish(launch, dtype, tile.batch, tile.head, tile.position + static_cast<std::int64_t>(tile.stride) * i);
      else
        row.store(launch, state_row(i), unit);
    }
    for_uncovered(tiling, tile, [&](std::int64_t position) {
      Softmax(width).finish(launch, dtype, tile.batch, tile.head, position);
    });
  });
}

void attend_meetings(const Launch& launch, DType dtype) {
  const Meetings& meetings = launch.meetings;
  const std::int64_t width = launch.head_dim;
  for (std::int64_t index = 0; index < launch.tile_count; ++index) {
    const MeetingTile& tile = pretend::reached(meetings.tiles)[index];
    const auto rows_of = [&](const void* data, const RowRun& run, int rows) {
      return Rows2d(data, run.at, run.stride, rows, width, dtype, meetings.aligned ? 16 : 1);
    };
    const Rows2d queries = rows_of(launch.q, tile.x, tile.rows);
    for (int i = 0; i < tile.rows; ++i) {
      Softmax row(width);
      const std::int64_t state_row = tile.state + static_cast<std::int64_t>(tile.state_stride) * i;
      row.load(launch, state_row, 1.0f);
      for (int p = tile.first_part; p < tile.first_part + tile.part_count; ++p) {
        const MeetingPart& part = pretend::reached(meetings.parts)[p];
        const Rows2d keys = rows_of(launch.k, part.u, part.rows), values = rows_of(launch.v, part.w, part.rows);
        for (int n = 0; n < part.rows && !(meetings.causal && n > part.first + std::int64_t{part.step} * i); ++n)
          row.meet(dot(queries[i], keys[n], width) * launch.scale_log2, 1.0f, values[n]);
      }
      row.store(launch, state_row, 1.0f);
    }
  }
}

}  // namespace

namespace sm90 {
bool takes(const Problem& problem, const DeviceInfo& device) {
  return device.compute_capability == 90 && problem.dtype != DType::fp32 &&
         (problem.head_dim == 64 || problem.head_dim == 128) && *problem.scale > 0 && can_schedule(problem);
}
TileShape tile_shape(const Problem&) { return {32, 16}; }
int arrivals(const Problem&) { return 1; }
int prepare(const Problem&) { return 1; }
bool can_address(const Launch& launch, const LaunchShape&) {
  return reinterpret_cast<std::uintptr_t>(launch.q) % 16 == 0 && launch.q_stride.token % 8 == 0;
}
void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream) {
  queue_on(stream, [=] { attend(launch, shape.dtype, launch.scale_log2); });
}
}  // namespace sm90

namespace mma {
bool takes(const Problem& problem, const DeviceInfo&) { return problem.head_dim <= 256 && can_schedule(problem); }
TileShape tile_shape(const Problem&, const DeviceInfo&) { return {16, 8}; }
int prepare(const Problem&, const DeviceInfo&) { return 2; }
void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream) {
  queue_on(stream, [=] {
    launch.meetings.tiles != nullptr ? attend_meetings(launch, shape.dtype) : attend(launch, shape.dtype, 1.0f);
  });
}
}  // namespace mma

namespace rows {
void prepare(DType) {}
// Other kernels here have masks instead of weights of 0: NaN and infinity are where they belong already.
void launch(const RowLaunch& p, DType dtype, int, cudaStream_t stream) {
  if (p.only_non_finite) return;
  queue_on(stream, [=] {
    const Launch& launch = p.common;
    const std::int64_t width = launch.head_dim;
    std::vector<float> query(static_cast<std::size_t>(width)), key(query), value(query);
    for (std::int64_t batch = 0; batch < p.batch; ++batch)
      for (int head = 0; head < launch.heads; ++head)
        for (std::int64_t position = 0; position < launch.tokens; ++position) {
          load_row(query.data(), launch.q, offset(launch.q_stride, batch, head, position), width, dtype);
          Softmax row(width);
          for (int b = 0; b < p.branch_count; ++b) {
            const RowGroup group(p, b, head, position);
            for (std::int64_t n = 0; n < (p.causal ? std::min(group.own + 1, group.count) : group.count); ++n) {
              const std::int64_t at = group.first + n * group.step, kv_head = head / launch.sharers;
              load_row(key.data(), launch.k, offset(launch.k_stride, batch, kv_head, at), width, dtype);
              load_row(value.data(), launch.v, offset(launch.v_stride, batch, kv_head, at), width, dtype);
              row.meet(dot(query.data(), key.data(), width) * launch.scale_log2, 1.0f, value.data());
            }
            if (group.zero_keys > 0) row.meet(0.0f, static_cast<float>(group.zero_keys), nullptr);
          }
          row.finish(launch, dtype, batch, head, position);
        }
  });
}
}  // namespace rows

}  // namespace annulus::cuda
