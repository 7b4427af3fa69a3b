// The backward kernels of a pretend GPU: what backward_kernels.h asks for, tile by tile and pair by pair (eq. 6). Sums
// of dq go through slots and turns as on a GPU, and whoever would come too early ends the program.
#include "kernels/cuda/backward_kernels.h"

#include "pretend_cuda/rows.h"

namespace annulus::cuda {
namespace {

constexpr float kLog2E = 1.442695040888963407f;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "pretend GPU: %s\n", what);
  std::abort();
}

float number_at(const float* base, std::int64_t at) { return *pretend::reached(base + at); }

// With its table where place_sums finds it.
GradientLaunch with_table(GradientLaunch g) {
  if (g.regions.table != nullptr) g.regions.table = pretend::reached(g.regions.table);
  return g;
}

struct Pair {
  float p = 0, ds = 0;
};
// x: q . k; dp: dout . v.
Pair pair_of(const Launch& launch, float x, float dp, float lse, float delta, int count = 1) {
  const float p = static_cast<float>(count) * std::exp2(x * launch.scale_log2 - lse * kLog2E);
  return {p, p * (dp - delta)};
}

// Eq. 8, from the sums of P v and of P. As infinities would have it: by the branch's own output, not by the mean of dP.
float delta_of(const float* dout, const float* values, std::int64_t width, float weight, float zero_keys, float lse) {
  const float sum = weight + zero_keys * std::exp2(-lse * kLog2E);
  if (sum == 0.0f) return 0.0f;
  std::vector<float> out(values, values + width);
  for (float& value : out) value /= sum;
  return dot(dout, out.data(), width);
}

// Sums of some rows, one or two of each.
class Sums {
 public:
  Sums(std::int64_t rows, int count, std::int64_t width)
      : width_(width), count_(count), values_(static_cast<std::size_t>(rows * count * width), 0.0f) {}
  float* at(std::int64_t row, int which) { return values_.data() + (row * count_ + which) * width_; }

  void load(const Launch& launch, std::int64_t state_row, std::int64_t row, bool frees) {
    float2& flag = pretend::reached(launch.state_sums)[state_row];
    if (flag.y != 0.0f)
      load_row(at(row, 0), launch.state_values, state_row * count_ * width_, count_ * width_, DType::fp32);
    if (frees) flag = {0.0f, 0.0f};
  }
  void store(const Launch& launch, std::int64_t state_row, std::int64_t row) {
    pretend::reached(launch.state_sums)[state_row] = {0.0f, 1.0f};
    store_row(launch.state_values, state_row * count_ * width_, at(row, 0), 1.0f, count_ * width_, DType::fp32);
  }

 private:
  std::int64_t width_;
  int count_;
  std::vector<float> values_;
};

// ---- dq by tiles of queries, and Delta of eq. 8

void walk_queries(const GradientLaunch& g, DType dtype, bool deltas) {
  const Launch& launch = g.common;
  const std::int64_t width = launch.head_dim;
  for_each_tile(launch, 1, [&](const Tiling& tiling, const Stretch& stretch, Tile& tile) {
    gather_parts(tiling, stretch, tiling.causal ? Sight::before : Sight::all, tile);
    const auto rows_of = [&](const void* data, const Strides& stride) {
      return Rows2d(data, offset(stride, tile.batch, tile.head, tile.position), tile.stride * stride.token, tile.rows,
                    width, dtype);
    };
    const Rows2d queries = rows_of(launch.q, launch.q_stride), douts = rows_of(g.dout, g.dout_stride);
    Sums sums(tile.rows, 1, width);
    std::vector<float> weight(static_cast<std::size_t>(tile.rows), 0.0f);
    const auto position = [&](int i) { return tile.position + static_cast<std::int64_t>(tile.stride) * i; };
    const auto number = [&](int i) {
      return (std::int64_t{tile.batch} * launch.heads + tile.head) * launch.tokens + position(i);
    };
    const auto state_row = [&](int i) { return tile.state_row + static_cast<std::int64_t>(tile.stride) * i; };
    for (int i = 0; tile.continues && !deltas && i < tile.rows; ++i) sums.load(launch, state_row(i), i, tile.is_last);
    for (int b = 0; b < tile.branch_count; ++b) {
      const TileBranch& part = tile.branches[b];
      const auto keys_of = [&](const void* data, const Strides& stride) {
        return rows_of_part(data, stride, tiling, tile, part, tile.head / launch.sharers, width, dtype);
      };
      const Rows2d keys = keys_of(launch.k, launch.k_stride), values = keys_of(launch.v, launch.v_stride);
      for (int i = 0; i < tile.rows; ++i)
        for (int n = 0; n < part.keys && !(tiling.causal && n > part.first + part.step * i); ++n) {
          const float dp = dot(douts[i], values[n], width);
          const float delta = deltas ? 0.0f : number_at(g.delta, g.delta_offset[part.branch] + number(i));
          const Pair pair = pair_of(launch, dot(queries[i], keys[n], width), dp, number_at(g.lse, number(i)), delta,
                                    key_count(tiling, tile, part, n));
          weight[static_cast<std::size_t>(i)] += pair.p;
          deltas ? add(sums.at(i, 0), pair.p, values[n], width) : add(sums.at(i, 0), pair.ds, keys[n], width);
        }
    }
    for (int i = 0; i < tile.rows; ++i) {
      if (deltas) {
        if (tile.branch_count == 0) continue;
        *pretend::reached(g.delta + g.delta_offset[0] + number(i)) =
            delta_of(douts[i], sums.at(i, 0), width, weight[static_cast<std::size_t>(i)],
                     static_cast<float>(tile.zero_keys), number_at(g.lse, number(i)));
      } else if (tile.is_last) {
        store_row(g.dq, offset(g.dq_stride, tile.batch, tile.head, position(i)), sums.at(i, 0), g.factor, width, dtype);
      } else {
        sums.store(launch, state_row(i), i);
      }
    }
    const std::vector<float> zeros(static_cast<std::size_t>(width), 0.0f);
    for_uncovered(tiling, tile, [&](std::int64_t at) {
      if (!deltas) store_row(g.dq, offset(g.dq_stride, tile.batch, tile.head, at), zeros.data(), 1.0f, width, dtype);
    });
  });
}

// ---- dk and dv by tiles of keys; dq where it is added up

class KeyWalk {
 public:
  // `wanted`: dk, dv, or both, one behind the other in the state.
  KeyWalk(const GradientLaunch& g, DType dtype, bool wants_dk, bool wants_dv)
      : g_(with_table(g)),
        launch_(g_.common),
        width_(g.common.head_dim),
        dtype_(dtype),
        wants_dk_(wants_dk),
        wants_dv_(wants_dv) {}

  void run() {
    for_each_tile(launch_, 1,
                  [&](const Tiling& tiling, const Stretch& stretch, Tile& tile) { walk(tiling, stretch, tile); });
    if (g_.regions.ended == nullptr) return;
    for (std::int64_t region = 0; region < g_.regions.count; ++region)
      if (pretend::reached(g_.regions.ended)[region] != table(region).tiles) fail("a region that never ends");
  }

 private:
  const Region& table(std::int64_t region) const { return g_.regions.table[region]; }

  void walk(const Tiling& tiling, const Stretch& stretch, Tile& tile) {
    const int kv_head = tile.head, count = wants_dk_ + wants_dv_;
    const auto rows_of = [&](const void* data, const Strides& stride) {
      return Rows2d(data, offset(stride, tile.batch, kv_head, tile.position), tile.stride * stride.token, tile.rows,
                    width_, dtype_);
    };
    const Rows2d keys = rows_of(launch_.k, launch_.k_stride), values = rows_of(launch_.v, launch_.v_stride);
    Sums sums(tile.rows, count, width_);
    const auto state_row = [&](int i) { return tile.state_row + static_cast<std::int64_t>(tile.stride) * i; };
    for (int i = 0; tile.continues && i < tile.rows; ++i) sums.load(launch_, state_row(i), i, tile.is_last);
    const std::int64_t window = g_.regions.table == nullptr ? 0 : (tile.cell_end - 1) / g_.regions.length;
    const std::int64_t region =
        g_.regions.table == nullptr
            ? 0
            : (std::int64_t{tile.batch} * g_.regions.windows + window) * g_.regions.kv_heads + kv_head;
    wait_for_slot(region);
    for (int head = kv_head * launch_.sharers; tile.rows > 0 && head < (kv_head + 1) * launch_.sharers; ++head) {
      take_head(tiling, stretch, g_.causal, head, tile);
      for (int b = 0; b < tile.branch_count; ++b)
        meet(tiling, stretch, tile, tile.branches[b], keys, values, region, window * g_.regions.length, sums);
    }
    for (int i = 0; i < tile.rows; ++i) {
      if (tile.is_last)
        put(tile.batch, kv_head, tile.position + static_cast<std::int64_t>(tile.stride) * i, sums.at(i, 0));
      else
        sums.store(launch_, state_row(i), i);
    }
    const std::vector<float> zeros(static_cast<std::size_t>(2 * width_), 0.0f);
    for_uncovered(tiling, tile, [&](std::int64_t position) { put(tile.batch, kv_head, position, zeros.data()); });
    end_tile(region);
  }

  void meet(const Tiling& tiling, const Stretch& stretch, const Tile& tile, const TileBranch& part, const Rows2d& keys,
            const Rows2d& values, std::int64_t region, std::int64_t region_begin, Sums& sums) {
    const std::int64_t dilation = tiling.branches[part.branch].dilation;
    const auto rows_of = [&](const void* data, const Strides& stride) {
      return rows_of_part(data, stride, tiling, tile, part, tile.head, width_, dtype_);
    };
    const Rows2d queries = rows_of(launch_.q, launch_.q_stride), douts = rows_of(g_.dout, g_.dout_stride);
    const int block = tiling.shape.key_rows, begin = first_block(part, g_.causal, block) * block;
    const SumPlace place = place_sums(g_, tile.batch, tile.head, region, region_begin);
    for (int n = begin; n < part.keys; ++n) {
      const std::int64_t position = part.key_begin + dilation * n;
      const int sum_row = g_.sums.residue_rows == 0 ? 0 : g_.sums.row(static_cast<int>(position - place.begin));
      if (g_.tiles_added != nullptr && n % block == 0) {
        unsigned& added = *pretend::reached(g_.tiles_added + place.first / width_ + sum_row);
        if (added != static_cast<unsigned>(turn_of(stretch.order, part, n, tiling.shape.query_rows)))
          fail("a tile before its turn");
        ++added;
      }
      const bool ordered = g_.ordered_lse != nullptr;
      const std::int64_t head = std::int64_t{tile.batch} * launch_.heads + tile.head;
      const std::int64_t number = ordered ? head * g_.number_rows + g_.numbers.row(static_cast<int>(position))
                                          : head * launch_.tokens + position;
      const float lse = number_at(ordered ? g_.ordered_lse : g_.lse, number);
      const float delta = number_at(ordered ? g_.ordered_delta : g_.delta, g_.delta_offset[part.branch] + number);
      std::vector<float> dq(static_cast<std::size_t>(width_), 0.0f);
      for (int i = 0; i < tile.rows; ++i) {
        if (g_.causal && n < part.first + part.step * i) continue;
        const Pair pair = pair_of(launch_, dot(queries[n], keys[i], width_), dot(douts[n], values[i], width_), lse,
                                  delta, key_count(tiling, tile, part, n));
        if (wants_dk_) add(sums.at(i, 0), pair.ds, queries[n], width_);
        if (wants_dv_) add(sums.at(i, wants_dk_), pair.p, douts[n], width_);
        if (g_.dq_sums != nullptr) add(dq.data(), pair.ds, keys[i], width_);
      }
      for (std::int64_t e = 0; g_.dq_sums != nullptr && e < width_; ++e)
        *pretend::reached(g_.dq_sums + place.first + sum_place(g_.sums, sum_row, width_, e)) +=
            dq[static_cast<std::size_t>(e)];
    }
  }

  void put(std::int64_t batch, int kv_head, std::int64_t position, const float* sums) {
    if (wants_dk_) store_row(g_.dk, offset(g_.dk_stride, batch, kv_head, position), sums, g_.factor, width_, dtype_);
    if (wants_dv_)
      store_row(g_.dv, offset(g_.dv_stride, batch, kv_head, position), sums + wants_dk_ * width_, g_.value_factor,
                width_, dtype_);
  }

  void wait_for_slot(std::int64_t region) {
    if (g_.regions.rounded == nullptr || table(region).before == Region::kNone) return;
    if (pretend::reached(g_.regions.rounded)[table(region).before] != static_cast<unsigned>(g_.regions.runs))
      fail("a tile whose slot is not free when all before it have ended");
  }

  void end_tile(std::int64_t region) {
    if (g_.regions.ended == nullptr || ++pretend::reached(g_.regions.ended)[region] != table(region).tiles) return;
    for (int i = 0; i < g_.regions.runs; ++i) {
      const Run run(g_.regions, launch_.sharers, launch_.tokens, g_.sums.stride, region, i);
      if (run.rows > 0) round(run);
    }
    if (g_.regions.rounded != nullptr)
      pretend::reached(g_.regions.rounded)[region] += static_cast<unsigned>(g_.regions.runs);
  }

  void round(const Run& run) {
    const SumPlace place = place_sums(g_, run.batch, run.head, run.region, run.begin);
    std::vector<float> row(static_cast<std::size_t>(width_));
    for (int i = 0; i < run.rows; ++i) {
      for (std::int64_t e = 0; e < width_; ++e) {
        float& sum =
            *pretend::reached(g_.dq_sums + place.first + sum_place(g_.sums, run.row_in_window(g_.sums) + i, width_, e));
        row[static_cast<std::size_t>(e)] = sum;
        if (g_.regions.rounded != nullptr) sum = 0.0f;
      }
      const std::int64_t position = (run.first + i) * g_.sums.stride + run.residue;
      store_row(g_.dq, offset(g_.dq_stride, run.batch, run.head, position), row.data(), g_.factor, width_, dtype_);
    }
  }

  const GradientLaunch g_;
  const Launch& launch_;
  std::int64_t width_;
  DType dtype_;
  bool wants_dk_, wants_dv_;
};

// ---- Rows that have travelled

void walk_meetings(const GradientLaunch& g, DType dtype, mma::Part part_of_results) {
  const Launch& launch = g.common;
  const Meetings& meetings = launch.meetings;
  const std::int64_t width = launch.head_dim;
  const auto add_to = [&](int which, const RowRun& rows, int i, float weight, const float* row) {
    float* const sum = pretend::reached(g.sums_of_meetings[which] + rows.at + i * rows.stride);
    add(sum, weight, row, width);
  };
  for (std::int64_t index = 0; index < launch.tile_count; ++index) {
    const MeetingTile& tile = pretend::reached(meetings.tiles)[index];
    const auto rows_of = [&](const void* data, const RowRun& run, int rows) {
      return Rows2d(data, run.at, run.stride, rows, width, dtype, meetings.aligned ? 16 : 1);
    };
    const Rows2d x = rows_of(meetings.of_keys ? launch.k : launch.q, tile.x, tile.rows);
    const Rows2d y = rows_of(meetings.of_keys ? launch.v : g.dout, tile.y, tile.rows);
    for (int p = tile.first_part; p < tile.first_part + tile.part_count; ++p) {
      const MeetingPart& part = pretend::reached(meetings.parts)[p];
      const Rows2d u = rows_of(meetings.of_keys ? launch.q : launch.k, part.u, part.rows);
      const Rows2d w = rows_of(meetings.of_keys ? g.dout : launch.v, part.w, part.rows);
      for (int i = 0; i < tile.rows; ++i)
        for (int n = 0; n < part.rows; ++n) {
          const std::int64_t edge = part.first + std::int64_t{part.step} * i;
          if (meetings.causal && (meetings.of_keys ? n < edge : n > edge)) continue;
          const RowRun &lse = meetings.of_keys ? part.lse : tile.lse,
                       &delta = meetings.of_keys ? part.delta : tile.delta;
          const int query = meetings.of_keys ? n : i;
          const Pair pair = pair_of(launch, dot(x[i], u[n], width), dot(y[i], w[n], width),
                                    number_at(g.lse, lse.at + query * lse.stride),
                                    number_at(g.delta, delta.at + query * delta.stride));
          if (part_of_results != mma::Part::dv) add_to(0, tile.sums[0], i, pair.ds, u[n]);
          if (meetings.of_keys && part_of_results != mma::Part::dk) add_to(1, tile.sums[1], i, pair.p, w[n]);
        }
    }
  }
}

}  // namespace

namespace delta {
void launch(const GradientLaunch& given, DType dtype, cudaStream_t stream) {
  queue_on(stream, [=] {
    const GradientLaunch g = with_table(given);
    const Launch& launch = g.common;
    const std::int64_t width = launch.head_dim;
    *pretend::reached(launch.control) = {};
    for (unsigned* counters : {g.regions.ended, g.regions.rounded})
      for (std::int64_t i = 0; counters != nullptr && i < g.regions.count; ++i) pretend::reached(counters)[i] = 0;
    for (std::int64_t region = 0; region < g.regions.count; ++region)
      for (int r = 0; r < g.regions.runs; ++r) {
        const Run run(g.regions, launch.sharers, launch.tokens, g.sums.stride, region, r);
        if (g.dq_sums != nullptr && g.regions.table[region].before == Region::kNone) {
          const int first = run.row_in_window(g.sums);
          const std::int64_t place = place_sums(g, run.batch, run.head, region, run.begin).first + first * width;
          const int rows = std::min(Regions::kRunRows, g.sums.residue_rows - first % g.sums.residue_rows);
          for (std::int64_t e = 0; e < rows * width; ++e) *pretend::reached(g.dq_sums + place + e) = 0.0f;
          for (int i = 0; g.tiles_added != nullptr && i < rows; ++i)
            *pretend::reached(g.tiles_added + place / width + i) = 0;
        }
        for (int i = 0; i < run.rows; ++i) {
          const std::int64_t position = (run.first + i) * g.sums.stride + run.residue;
          const Rows2d out(g.forward_out, offset(g.forward_out_stride, run.batch, run.head, position), 0, 1, width,
                           dtype);
          const Rows2d dout(g.dout, offset(g.dout_stride, run.batch, run.head, position), 0, 1, width, dtype);
          const std::int64_t head = run.batch * launch.heads + run.head, at = head * launch.tokens + position;
          const float value = dot(out[0], dout[0], width) * g.out_factor;
          *pretend::reached(g.delta + at) = value;
          if (g.lse_copy == nullptr) continue;
          const std::int64_t ordered = head * g.number_rows + run.row(g.numbers) + i;
          *pretend::reached(g.lse_copy + ordered) = number_at(g.lse, at);
          *pretend::reached(g.delta_copy + ordered) = value;
        }
      }
  });
}
}  // namespace delta

namespace sm90 {
bool takes_gradient(const Problem& problem, const DeviceInfo& device) { return takes(problem, device); }
bool can_address(const GradientLaunch& launch, const LaunchShape& shape) {
  return can_address(launch.common, shape) && launch.dout_stride.token % 8 == 0;
}
int gradient_arrivals() { return 1; }
TileShape gradient_tile_shape(const Problem& problem) { return {32, problem.head_dim == 64 ? 32 : 16}; }
int prepare_gradient(const Problem&) { return 1; }
void launch_gradient(const GradientLaunch& launch, const LaunchShape& shape, cudaStream_t stream) {
  queue_on(stream, [=] { KeyWalk(launch, shape.dtype, true, true).run(); });
}
TileShape dq_tile_shape(const Problem&) { return {32, 16}; }
int prepare_dq(const Problem&) { return 1; }
void launch_dq(const GradientLaunch& launch, const LaunchShape& shape, cudaStream_t stream) {
  queue_on(stream, [=] { walk_queries(launch, shape.dtype, false); });
}
}  // namespace sm90

namespace mma {
bool takes_gradient(const Problem& problem, const DeviceInfo& device) { return takes(problem, device); }
TileShape gradient_tile_shape(const Problem&) { return {16, 8}; }
bool has_room_for_both(const Problem& problem) { return problem.head_dim <= 128; }
int prepare_gradient(const Problem&, Part) { return 2; }
void launch_gradient(const GradientLaunch& launch, const LaunchShape& shape, Part part, cudaStream_t stream) {
  queue_on(stream, [=] {
    if (launch.common.meetings.tiles != nullptr) return walk_meetings(launch, shape.dtype, part);
    if (part == Part::dq || part == Part::deltas) return walk_queries(launch, shape.dtype, part == Part::deltas);
    KeyWalk(launch, shape.dtype, part != Part::dv, part != Part::dk).run();
  });
}
}  // namespace mma

namespace rows {
void prepare_gradient(DType) {}
// As in forward, there is nothing to mend.
void launch_gradient(const GradientRowLaunch& p, GradientRows what, const LaunchShape& shape, int,
                     cudaStream_t stream) {
  if (p.rows.only_non_finite) return;
  queue_on(stream, [=, dtype = shape.dtype] {
    const GradientLaunch& g = p.gradient;
    const Launch& launch = g.common;
    const std::int64_t width = launch.head_dim, tokens = launch.tokens;
    const auto row = [&](const void* data, const Strides& stride, std::int64_t batch, std::int64_t head,
                         std::int64_t position) {
      return Rows2d(data, offset(stride, batch, head, position), 0, 1, width, dtype);
    };
    RowLaunch tables = p.rows;
    tables.common = launch;
    const std::int64_t kv_heads = launch.heads / launch.sharers;
    std::vector<float> dk(static_cast<std::size_t>(p.rows.batch * kv_heads * tokens * width), 0.0f), dv(dk);
    for (std::int64_t batch = 0; batch < p.rows.batch; ++batch)
      for (int head = 0; head < launch.heads; ++head)
        for (std::int64_t position = 0; position < tokens; ++position) {
          const Rows2d query = row(launch.q, launch.q_stride, batch, head, position);
          const Rows2d dout = row(g.dout, g.dout_stride, batch, head, position);
          const std::int64_t number = (batch * launch.heads + head) * tokens + position;
          std::vector<float> dq(static_cast<std::size_t>(width), 0.0f);
          for (int b = 0; b < p.rows.branch_count; ++b) {
            const RowGroup group(tables, b, head, position);
            float* const delta = pretend::reached(g.delta + b * p.delta_stride + number);
            std::vector<float> values(static_cast<std::size_t>(width), 0.0f);
            float weight = 0;
            for (std::int64_t n = 0; n < (p.rows.causal ? std::min(group.own + 1, group.count) : group.count); ++n) {
              const std::int64_t at = group.first + n * group.step, kv_head = head / launch.sharers;
              const Rows2d key = row(launch.k, launch.k_stride, batch, kv_head, at);
              const Rows2d value = row(launch.v, launch.v_stride, batch, kv_head, at);
              const Pair pair = pair_of(launch, dot(query[0], key[0], width), dot(dout[0], value[0], width),
                                        number_at(g.lse, number), what == GradientRows::deltas ? 0.0f : *delta);
              weight += pair.p;
              add(values.data(), pair.p, value[0], width);
              if (what == GradientRows::deltas) continue;
              const std::int64_t own = ((batch * kv_heads + kv_head) * tokens + at) * width;
              add(dq.data(), pair.ds, key[0], width);
              add(dk.data() + own, pair.ds, query[0], width);
              add(dv.data() + own, pair.p, dout[0], width);
            }
            if (what != GradientRows::deltas || group.count == 0) continue;
            *delta = delta_of(dout[0], values.data(), width, weight, static_cast<float>(group.zero_keys),
                              number_at(g.lse, number));
          }
          if (what == GradientRows::results)
            store_row(g.dq, offset(g.dq_stride, batch, head, position), dq.data(), g.factor, width, dtype);
        }
    for (std::int64_t i = 0; what == GradientRows::results && i < p.rows.batch * kv_heads * tokens; ++i) {
      const std::int64_t batch = i / tokens / kv_heads, head = i / tokens % kv_heads;
      store_row(g.dk, offset(g.dk_stride, batch, head, i % tokens), dk.data() + i * width, g.factor, width, dtype);
      store_row(g.dv, offset(g.dv_stride, batch, head, i % tokens), dv.data() + i * width, g.value_factor, width,
                dtype);
    }
  });
}
}  // namespace rows

}  // namespace annulus::cuda
