#include "exec/resharding.h"

#include <algorithm>
#include <set>

namespace annulus {
namespace {

// One head of a tensor [batch, rows, heads, head_dim].
template <class View>
View head_of(const View& view, std::int64_t head) {
  return part_of(view, {0, 1, view.shape[1]}, head);
}

// One head of [batch, heads, rows].
TensorView head_of_rows(float* data, std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t head) {
  return {data == nullptr ? nullptr : data + head * rows, DType::fp32, {batch, rows, 1, 1}, {heads * rows, 1, 1, 1}};
}

TensorView writable(const ConstTensorView& view) {
  return {const_cast<void*>(view.data), view.dtype, view.shape, view.stride};
}

}  // namespace

Resharding::Resharding(const Problem& problem, const Sharding& sharding, const ParcelMemory& parcels,
                       std::vector<Unit> units, int rank, const Options& device)
    : problem_(problem),
      sharding_(sharding),
      parcels_(parcels),
      units_(std::move(units)),
      rank_(rank),
      peers_(find_peers()) {
  for (const Unit& unit : units_)
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (unit.computer != rank_) continue;
      auto& entry = shorts_[{pass, unit.rows.count, unit.heads.size()}];
      if (entry != nullptr) continue;
      Problem part = problem;
      part.tokens = unit.rows.count;
      part.heads = static_cast<std::int64_t>(unit.heads.size());
      part.kv_heads = 1;
      part.documents = {};
      part.pattern = make_pattern(Preset::longnet, {unit.rows.count}, {1}, part.heads);
      if (pass == Pass::backward) part.pattern.output_scale = problem.pattern.output_scale;  // forward: after merging
      entry = std::make_unique<Short>();
      entry->problem = resolve(part);
      entry->plan = make_plan(entry->problem);
      entry->kernels = make_kernels(entry->problem, entry->plan, device,
                                    {{Rows{0, 1, unit.rows.count}}, /*stepwise=*/true, /*own_states=*/true});
    }
}

const Resharding::Short& Resharding::short_problem(Pass pass, const Unit& unit) const {
  return *shorts_.at({pass, unit.rows.count, unit.heads.size()});
}

std::vector<Rows> Resharding::rows_of(const Unit& unit, int rank) const {
  std::vector<Rows> result;
  for (const Rows& piece : pieces_of(sharding_, problem_.tokens, rank))
    if (const Rows rows = intersect(unit.rows, piece); !rows.empty()) result.push_back(rows);
  return result;
}

std::vector<int> Resharding::find_peers() const {
  std::set<int> ranks;
  for (const Unit& unit : units_) {
    ranks.insert(unit.computer);
    if (unit.computer != rank_) continue;
    for (int rank = 0; rank < sharding_.ranks; ++rank)
      if (!rows_of(unit, rank).empty()) ranks.insert(rank);
  }
  ranks.erase(rank_);
  return {ranks.begin(), ranks.end()};
}

// ---- how a unit lies in memory: what goes out in front, what comes home behind it

std::int64_t Resharding::row_bytes(Pass pass, bool homeward, const Unit& unit) const {
  const auto heads = static_cast<std::int64_t>(unit.heads.size());
  const std::int64_t vector = problem_.head_dim * size_of(problem_.dtype), sums = problem_.head_dim * 4;
  if (pass == Pass::forward) return homeward ? heads * (sums + 4) : heads * vector + 2 * vector;
  return homeward ? heads * sums + 2 * sums : heads * (2 * vector + 8) + 2 * vector;
}

std::int64_t Resharding::unit_bytes(Pass pass, const Unit& unit) const {
  Carver carver;
  carve_unit(pass, unit, carver);
  return carver.used_bytes();
}

// Each tensor begins where the copy engine of a GPU can begin, however odd the numbers of rows are.
Resharding::UnitTensors Resharding::carve_unit(Pass pass, const Unit& unit, Carver& carver) const {
  const auto heads = static_cast<std::int64_t>(unit.heads.size());
  const std::int64_t rows = problem_.batch * unit.rows.count, dim = problem_.head_dim;
  const auto take = [&](DType dtype, std::int64_t n, std::int64_t width) {
    auto* data = carver.take<std::byte>("unit", rows * n * width * size_of(dtype));
    return TensorView(data, dtype, {problem_.batch, unit.rows.count, n, width});
  };
  const bool forward = pass == Pass::forward;
  UnitTensors unit_tensors;
  unit_tensors.lse = carver.take<float>("unit", rows * heads);
  if (!forward) unit_tensors.delta = carver.take<float>("unit", rows * heads);
  unit_tensors.values = take(DType::fp32, heads, dim);
  if (!forward) unit_tensors.both = take(DType::fp32, 1, 2 * dim);
  unit_tensors.q = take(problem_.dtype, heads, dim);
  if (!forward) unit_tensors.dout = take(problem_.dtype, heads, dim);
  unit_tensors.k = take(problem_.dtype, 1, dim);
  unit_tensors.v = take(problem_.dtype, 1, dim);
  return unit_tensors;
}

// In the order of messages.
std::vector<Resharding::Lane> Resharding::lanes(Pass pass, bool homeward, const Unit& unit, const Tensors& own,
                                                std::byte* memory) const {
  const auto heads = static_cast<std::int64_t>(unit.heads.size());
  const std::int64_t count = unit.rows.count, batch = problem_.batch, dim = problem_.head_dim;
  const std::int64_t own_rows = count_rows(pieces_of(sharding_, problem_.tokens, rank_));
  const bool forward = pass == Pass::forward;
  Carver carver(memory);
  const UnitTensors in_unit = carve_unit(pass, unit, carver);
  const auto half_of_both = [&](std::int64_t i) {
    TensorView view = in_unit.both;
    view.shape[3] = dim;
    if (view.data != nullptr) view.data = static_cast<float*>(view.data) + i * dim;
    return view;
  };
  const TensorView dk = half_of_both(0), dv = half_of_both(1);

  std::vector<Lane> result;
  for (std::int64_t i = 0; i < heads; ++i) {
    const std::int64_t head = unit.heads[static_cast<std::size_t>(i)];
    const auto own_row = [&](const float* data) {
      return head_of_rows(const_cast<float*>(data), batch, problem_.heads, own_rows, head);
    };
    const TensorView unit_lse = head_of_rows(in_unit.lse, batch, heads, count, i);
    if (homeward && forward) {
      result.push_back({{}, unit_lse, head, Lane::Kind::lse});
      result.push_back({{}, head_of(in_unit.values, i), head, Lane::Kind::values});
    } else if (homeward) {
      result.push_back({head_of(own.dq, head), head_of(in_unit.values, i), head, Lane::Kind::added});
    } else {
      if (!forward) {
        result.push_back({own_row(own.lse), unit_lse, head});
        result.push_back({own_row(own.delta), head_of_rows(in_unit.delta, batch, heads, count, i), head});
      }
    }
  }
  if (homeward && !forward) {
    result.push_back({head_of(own.dk, unit.kv_head), head_of(dk, 0), unit.kv_head, Lane::Kind::added});
    result.push_back({head_of(own.dv, unit.kv_head), head_of(dv, 0), unit.kv_head, Lane::Kind::added});
  }
  if (homeward) return result;
  for (std::int64_t i = 0; i < heads; ++i) {
    const std::int64_t head = unit.heads[static_cast<std::size_t>(i)];
    result.push_back({head_of(writable(own.q), head), head_of(in_unit.q, i), head});
    if (!forward) result.push_back({head_of(writable(own.dout), head), head_of(in_unit.dout, i), head});
  }
  result.push_back({head_of(writable(own.k), unit.kv_head), head_of(in_unit.k, 0), unit.kv_head});
  result.push_back({head_of(writable(own.v), unit.kv_head), head_of(in_unit.v, 0), unit.kv_head});
  return result;
}

Resharding::Memory Resharding::carve(Pass pass, Carver& carver) const {
  Memory memory;
  if (empty()) return memory;
  std::int64_t kernel_bytes = 0, out = 0, home = 0;
  for (const auto& [key, part] : shorts_)
    if (std::get<0>(key) == pass) kernel_bytes = std::max(kernel_bytes, total_bytes(part->kernels->workspace(pass)));
  auto* start = carver.take<std::byte>("reshard", kernel_bytes);
  if (!carver.measuring()) memory.kernels = {start, static_cast<std::size_t>(kernel_bytes)};
  for (const int peer : peers_) {
    out += message_bytes(pass, false, rank_, peer);
    home += message_bytes(pass, true, peer, rank_);
  }
  memory.slot = carver.take<std::byte>("reshard", std::max(out, home));
  for (const Unit& unit : units_)
    memory.units.push_back(unit.computer == rank_ ? carver.take<std::byte>("reshard", unit_bytes(pass, unit))
                                                  : nullptr);
  return memory;
}

// ---- what moves

// Rows of `owner` in units of `computer`, out or home.
std::int64_t Resharding::message_bytes(Pass pass, bool homeward, int computer, int owner) const {
  std::int64_t bytes = 0;
  for (const Unit& unit : units_)
    if (unit.computer == computer)
      bytes += problem_.batch * count_rows(rows_of(unit, owner)) * row_bytes(pass, homeward, unit);
  return bytes;
}

std::vector<std::int64_t> Resharding::sent_to(Pass pass) const {
  std::vector<std::int64_t> result(static_cast<std::size_t>(sharding_.ranks), 0);
  for (const int peer : peers_)
    result[static_cast<std::size_t>(peer)] =
        message_bytes(pass, false, peer, rank_) + message_bytes(pass, true, rank_, peer);
  return result;
}

std::int64_t Resharding::received_bytes(Pass pass) const {
  std::int64_t bytes = 0;
  for (const int peer : peers_)
    bytes += message_bytes(pass, false, rank_, peer) + message_bytes(pass, true, peer, rank_);
  return bytes;
}

Resharding::Partners Resharding::partners(Pass pass, bool homeward) const {
  Partners partners;
  for (const int peer : peers_) {
    const std::int64_t as_owner = message_bytes(pass, homeward, peer, rank_);
    const std::int64_t as_computer = message_bytes(pass, homeward, rank_, peer);
    if ((homeward ? as_computer : as_owner) > 0) partners.to.push_back(peer);
    const std::int64_t arriving = homeward ? as_owner : as_computer;
    if (arriving > 0) partners.from.push_back(peer);
    partners.arriving_bytes += arriving;
  }
  return partners;
}

Exchange Resharding::go_out(Pass pass, const Tensors& own, const Memory& memory) const {
  Exchange exchange;
  std::byte* data = memory.slot;
  for (const int peer : peers_) {
    Send send{.peer = peer, .blocks = {}};
    for (const Unit& unit : units_) {
      if (unit.computer != peer) continue;
      for (const Lane& lane : lanes(pass, false, unit, own, nullptr))
        for (const Rows& rows : rows_of(unit, rank_))
          send.blocks.push_back(ParcelMemory::block(part_of(lane.own, parcels_.own_rows(rows))));
    }
    if (!send.blocks.empty()) exchange.sends.push_back(std::move(send));
    const std::int64_t bytes = message_bytes(pass, false, rank_, peer);
    if (bytes > 0) exchange.receives.push_back({peer, {data, static_cast<std::size_t>(bytes)}});
    data += bytes;
  }
  return exchange;
}

Exchange Resharding::come_home(Pass pass, const Tensors& own, const Memory& memory) const {
  Exchange exchange;
  std::byte* data = memory.slot;
  for (const int peer : peers_) {
    Send send{.peer = peer, .blocks = {}};
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (units_[u].computer != rank_) continue;
      for (const Lane& lane : lanes(pass, true, units_[u], own, memory.units[u]))
        for (const Rows& rows : rows_of(units_[u], peer))
          send.blocks.push_back(ParcelMemory::block(part_of(lane.unit, memory_rows(rows, units_[u].rows))));
    }
    if (!send.blocks.empty()) exchange.sends.push_back(std::move(send));
    const std::int64_t bytes = message_bytes(pass, true, peer, rank_);
    if (bytes > 0) exchange.receives.push_back({peer, {data, static_cast<std::size_t>(bytes)}});
    data += bytes;
  }
  return exchange;
}

// ---- what is done with it

void Resharding::compute(Pass pass, const Tensors& own, const Memory& memory, const Kernels& kernels) const {
  // Make the units whole.
  const std::byte* data = memory.slot;
  std::vector<int> sources = peers_;
  sources.push_back(rank_);
  for (const int source : sources)
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const Unit& unit = units_[u];
      if (unit.computer != rank_) continue;
      for (const Lane& lane : lanes(pass, false, unit, own, memory.units[u]))
        for (const Rows& rows : rows_of(unit, source)) {
          const TensorView to = part_of(lane.unit, memory_rows(rows, unit.rows));
          if (source == rank_) {
            kernels.copy(part_of(lane.own, parcels_.own_rows(rows)), to);
            continue;
          }
          kernels.copy(ConstTensorView(data, to.dtype, to.shape), to);
          data += to.shape[0] * to.shape[1] * to.shape[3] * size_of(to.dtype);
        }
    }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    if (unit.computer != rank_) continue;
    const Short& part = short_problem(pass, unit);
    part.kernels->poll = kernels.poll;
    part.kernels->stream = kernels.stream;
    const auto count = static_cast<std::size_t>(problem_.batch * unit.rows.count) * unit.heads.size();
    // The first lanes of a unit know where its tensors begin.
    const std::vector<Lane> in = lanes(pass, false, unit, own, memory.units[u]);
    const std::vector<Lane> out = lanes(pass, true, unit, own, memory.units[u]);
    const auto whole = [&](const TensorView& first_head, std::int64_t heads) {
      return TensorView(first_head.data, first_head.dtype, {problem_.batch, unit.rows.count, heads, problem_.head_dim});
    };
    const auto heads = static_cast<std::int64_t>(unit.heads.size());
    const TensorView k = whole(in[in.size() - 2].unit, 1), v = whole(in.back().unit, 1);
    if (pass == Pass::forward) {
      const KeySource source(part.problem, {.owner = rank_, .rows = {0, 1, unit.rows.count}}, {k, v, {}, {}});
      part.kernels->forward({.q = whole(in.front().unit, heads),
                             .k = k,
                             .v = v,
                             .out = whole(out[1].unit, heads),
                             .lse = {static_cast<float*>(out[0].unit.data), count},
                             .workspace = memory.kernels,
                             .stream = kernels.stream},
                            {.sources = {&source, 1}});
    } else {
      const std::size_t q = 2 * unit.heads.size();  // behind lse and Delta of each head
      const TensorView dk = out[out.size() - 2].unit, dv = out.back().unit;
      const KeySource source(part.problem, {.owner = rank_, .rows = {0, 1, unit.rows.count}}, {k, v, dk, dv});
      part.kernels->backward({.q = whole(in[q].unit, heads),
                              .k = k,
                              .v = v,
                              .out = {},
                              .lse = {static_cast<const float*>(in[0].unit.data), count},
                              .dout = whole(in[q + 1].unit, heads),
                              .dq = {},
                              .dk = {},
                              .dv = {},
                              .workspace = memory.kernels,
                              .stream = kernels.stream},
                             {.sources = {&source, 1},
                              .delta = static_cast<const float*>(in[1].unit.data),
                              .dq = whole(out[0].unit, heads)});
    }
  }
}

void Resharding::combine(const Lane& lane, const ConstTensorView& result, const ConstTensorView& lse,
                         const Rows& own_rows, const Tensors& own, const Kernels& kernels) const {
  if (lane.kind == Lane::Kind::values) kernels.merge(result, lse, own.states, lane.head, own_rows);
  if (lane.kind == Lane::Kind::added) kernels.add(result, part_of(lane.own, own_rows));
}

void Resharding::merge(Pass pass, const Tensors& own, const Memory& memory, const Kernels& kernels) const {
  const std::byte* data = memory.slot;
  std::vector<int> sources = peers_;
  sources.push_back(rank_);
  for (const int source : sources)
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const Unit& unit = units_[u];
      if (unit.computer != source) continue;
      std::vector<ConstTensorView> lse;  // of the head before its values, one for each piece
      for (const Lane& lane : lanes(pass, true, unit, own, memory.units[u])) {
        const std::vector<Rows> pieces = rows_of(unit, rank_);
        std::vector<ConstTensorView> results;
        for (const Rows& rows : pieces) {
          const TensorView place = part_of(lane.unit, memory_rows(rows, unit.rows));
          if (source == rank_) {
            results.push_back(place);
            continue;
          }
          results.emplace_back(data, place.dtype, place.shape);
          data += place.shape[0] * place.shape[1] * place.shape[3] * size_of(place.dtype);
        }
        for (std::size_t i = 0; i < pieces.size(); ++i)
          combine(lane, results[i], lse.empty() ? ConstTensorView{} : lse[i], parcels_.own_rows(pieces[i]), own,
                  kernels);
        lse = lane.kind == Lane::Kind::lse ? results : std::vector<ConstTensorView>{};
      }
    }
}

}  // namespace annulus
