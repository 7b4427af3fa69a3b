#include "reference/head_group.h"

#include <algorithm>
#include <array>
#include <limits>

namespace annulus::reference {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Lanes of partial sums: a shape that compilers turn into vector instructions.
template <class Real>
Real dot(const Real* a, const Real* b, std::int64_t n) {
  constexpr std::size_t kLanes = 64 / sizeof(Real);
  const std::size_t size = index(n);
  std::array<Real, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  Real sum = 0;
  for (; i < size; ++i) sum += a[i] * b[i];
  for (const Real lane : lanes) sum += lane;
  return sum;
}

// y += a x
template <class Real>
void add_scaled(Real a, const Real* __restrict x, Real* __restrict y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// Sizes pass over NaN and infinities: those have none, and are compared by kind.
void raise(double& highest, double x) {
  if (std::isfinite(x) && x > highest) highest = x;
}

void add_square(double& sum, double x) {
  if (std::isfinite(x)) sum += x * x;
}

}  // namespace

template <class Real>
Head<Real>::Head(const std::vector<double>& tensor, std::int64_t batch, std::int64_t head, std::int64_t heads,
                 const Problem& problem)
    : rows(problem.tokens, problem.head_dim) {
  for (std::int64_t t = 0; t < problem.tokens; ++t) {
    const double* from = tensor.data() + ((batch * problem.tokens + t) * heads + head) * problem.head_dim;
    double highest = 0;
    double squares = 0;
    for (std::int64_t d = 0; d < problem.head_dim; ++d) {
      rows.row(t)[d] = static_cast<Real>(from[d]);
      highest = std::max(highest, std::abs(from[d]));
      squares += from[d] * from[d];
    }
    largest.push_back(highest);
    norm.push_back(std::sqrt(squares));
  }
}

template <class Arithmetic>
TermSizes HeadGroup<Arithmetic>::attend(std::int64_t batch, std::int64_t kv_head, Result& result) {
  const std::int64_t tokens = problem_.tokens;
  const std::int64_t group = problem_.heads / problem_.kv_heads;
  terms_ = {};
  k_ = Head<Real>(inputs_.k, batch, kv_head, problem_.kv_heads, problem_);
  v_ = Head<Real>(inputs_.v, batch, kv_head, problem_.kv_heads, problem_);
  if (backward_) {
    dk_ = Matrix<Real>(tokens, problem_.head_dim);
    dv_ = Matrix<Real>(tokens, problem_.head_dim);
    key_terms_.assign(index(tokens), {});
  }
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    q_ = Head<Real>(inputs_.q, batch, head, problem_.heads, problem_);
    if (backward_) dout_ = Head<Real>(inputs_.dout, batch, head, problem_.heads, problem_);
    for (std::int64_t first = 0; first < tokens; first += kBlockRows) {
      attend_block(first, head);
      for (const Row& row : block_) write_row(row, batch, head, result);
    }
  }
  if (backward_) write_keys(batch, kv_head, result);
  return terms_;
}

template <class Arithmetic>
template <class Visit>
void HeadGroup<Arithmetic>::for_each_pair(Visit visit) {
  for (Row& row : block_) row.next = 0;
  for (std::int64_t begin = 0; begin < problem_.tokens; begin += kChunkKeys) {
    for (Row& row : block_) {
      while (row.next < row.keys.key.size() && row.keys.key[row.next] < begin + kChunkKeys) visit(row, row.next++);
    }
  }
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::attend_block(std::int64_t first, std::int64_t head) {
  const std::int64_t head_dim = problem_.head_dim;
  block_.resize(index(std::min(kBlockRows, problem_.tokens - first)));
  for (std::size_t i = 0; i < block_.size(); ++i) start_row(first + static_cast<std::int64_t>(i), head, block_[i]);

  for_each_pair([&](Row& row, std::size_t entry) {
    const std::int64_t key = row.keys.key[entry];
    row.score[entry] = store(scale() * dot(q_.rows.row(row.t), k_.rows.row(key), head_dim));
    if (backward_) row.d_probability[entry] = store(dot(row.dout.data(), v_.rows.row(key), head_dim));
  });
  for (Row& row : block_) {
    row.lse = normalise(row, kAllBranches, row.probability);
    if (!detached()) continue;
    for (std::size_t i = 0; i < problem_.pattern.branches.size(); ++i)
      normalise(row, static_cast<int>(i), row.branch_probability);
  }
  for_each_pair([&](Row& row, std::size_t entry) {
    const std::int64_t key = row.keys.key[entry];
    add_scaled(row.probability[entry], v_.rows.row(key), row.out.data(), head_dim);
    if (detached())
      add_scaled(row.branch_probability[entry], v_.rows.row(key), row.branch_out.row(row.keys.branch[entry]), head_dim);
    if constexpr (Arithmetic::kMeasuresTerms) measure_output(row, entry);
  });
  for (Row& row : block_) finish_output(row);
  if (!backward_) return;
  for_each_pair([&](Row& row, std::size_t entry) {
    add_gradients(row, entry);
    if constexpr (Arithmetic::kMeasuresTerms) measure_gradients(row, entry);
  });
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::start_row(std::int64_t t, std::int64_t head, Row& row) const {
  row.t = t;
  key_sets_.collect(t, head, row.keys);
  const std::size_t entries = row.keys.key.size();
  const std::size_t branches = problem_.pattern.branches.size();
  row.score.resize(entries);
  row.probability.resize(entries);
  row.out.assign(index(problem_.head_dim), 0);
  row.terms = {};
  if (!backward_) return;
  row.d_probability.resize(entries);
  row.dq.assign(index(problem_.head_dim), 0);
  row.delta.assign(branches, 0);
  row.dout.resize(index(problem_.head_dim));
  for (std::int64_t d = 0; d < problem_.head_dim; ++d)
    row.dout[index(d)] = store(static_cast<Real>(problem_.pattern.output_scale) * dout_.rows.row(t)[d]);
  if (!detached()) return;
  row.branch_probability.resize(entries);
  row.branch_out = Matrix<Real>(static_cast<std::int64_t>(branches), problem_.head_dim);
}

// Equation 4 and the weights of eq. 5, over all branches or over one; returns the log of the denominator.
template <class Arithmetic>
auto HeadGroup<Arithmetic>::normalise(const Row& row, int branch, std::vector<Real>& probability) const -> Real {
  const auto counts = [&](std::size_t entry) { return branch == kAllBranches || row.keys.branch[entry] == branch; };
  std::int64_t zero_keys = 0;
  for (std::size_t i = 0; i < row.keys.zero_keys.size(); ++i)
    if (branch == kAllBranches || branch == static_cast<int>(i)) zero_keys += row.keys.zero_keys[i];

  Real highest = zero_keys > 0 ? Real{0} : -std::numeric_limits<Real>::infinity();
  for (std::size_t e = 0; e < row.score.size(); ++e)
    if (counts(e) && row.score[e] > highest) highest = row.score[e];
  const Real shift = std::isinf(highest) && highest < 0 ? Real{0} : highest;

  Real sum = zero_keys > 0 ? static_cast<Real>(zero_keys) * std::exp(-shift) : Real{0};
  for (std::size_t e = 0; e < row.score.size(); ++e) {
    if (!counts(e)) continue;
    probability[e] = std::exp(row.score[e] - shift);
    sum += probability[e];
  }
  for (std::size_t e = 0; e < row.score.size(); ++e)
    if (counts(e)) probability[e] = store(probability[e] / sum);
  return shift + std::log(sum);
}

// O is complete: store it, and find Delta by eq. 7 or 8. Merge weights are constants in eq. 8, so each branch has its
// own.
template <class Arithmetic>
void HeadGroup<Arithmetic>::finish_output(Row& row) const {
  const std::int64_t head_dim = problem_.head_dim;
  const auto output_scale = static_cast<Real>(problem_.pattern.output_scale);
  for (Real& x : row.out) x = store(output_scale * store(x));
  if constexpr (Arithmetic::kMeasuresTerms)
    row.terms.out_norm = std::sqrt(dot(row.out.data(), row.out.data(), head_dim));
  if (!backward_) return;
  if (!detached()) {
    const Real delta = dot(dout_.rows.row(row.t), row.out.data(), head_dim);
    std::fill(row.delta.begin(), row.delta.end(), delta);
    return;
  }
  for (std::size_t i = 0; i < row.delta.size(); ++i) {
    Real* branch_out = row.branch_out.row(static_cast<std::int64_t>(i));
    for (std::int64_t d = 0; d < head_dim; ++d) branch_out[d] = store(branch_out[d]);
    row.delta[i] = dot(row.dout.data(), branch_out, head_dim);
  }
}

// Equation 6.
template <class Arithmetic>
void HeadGroup<Arithmetic>::add_gradients(Row& row, std::size_t entry) {
  const std::int64_t key = row.keys.key[entry];
  const std::int64_t head_dim = problem_.head_dim;
  const Real p = row.probability[entry];
  const Real ds = store(scale() * p * (row.d_probability[entry] - row.delta[index(row.keys.branch[entry])]));
  add_scaled(p, row.dout.data(), dv_.row(key), head_dim);
  add_scaled(ds, k_.rows.row(key), row.dq.data(), head_dim);
  add_scaled(ds, q_.rows.row(row.t), dk_.row(key), head_dim);
}

// A dot product of a and b in fp32 is off by about |a| |b| units; exp multiplies by 1 + the error of its logit.
template <class Arithmetic>
double HeadGroup<Arithmetic>::logit_size(const Row& row, std::size_t entry) const {
  const double norms = q_.norm[index(row.t)] * k_.norm[index(row.keys.key[entry])];
  return 1 + std::abs(static_cast<double>(row.score[entry])) + std::abs(*problem_.scale) * norms;
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::measure_output(Row& row, std::size_t entry) const {
  const auto key = index(row.keys.key[entry]);
  const double p = row.probability[entry];
  const double size = p * logit_size(row, entry);
  add_square(row.terms.lse_squares, size);
  add_square(row.terms.out_squares, size * v_.largest[key]);
  const double key_size = p * k_.largest[key];
  if (std::isfinite(key_size)) row.terms.mean_key += key_size;
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::measure_gradients(Row& row, std::size_t entry) {
  const auto key = index(row.keys.key[entry]);
  const auto t = index(row.t);
  const double p = row.probability[entry];
  const double ds = row.d_probability[entry] - row.delta[index(row.keys.branch[entry])];
  const double exponent_size = logit_size(row, entry) + std::abs(static_cast<double>(row.lse));
  const double dp_size = std::abs(problem_.pattern.output_scale) * dout_.norm[t] * v_.norm[key];
  const double delta_size = dout_.norm[t] * row.terms.out_norm;
  const double scaled_p = std::abs(*problem_.scale) * p;

  const double dp_error = exponent_size * std::abs(ds) + dp_size;
  KeyTerms& terms = key_terms_[key];
  add_square(row.terms.dq_squares, scaled_p * dp_error * k_.largest[key]);
  add_square(terms.dk_squares, scaled_p * (dp_error + delta_size) * q_.largest[t]);
  add_square(terms.dk_stored_squares, scaled_p * delta_size * q_.largest[t]);
  add_square(terms.dv_squares, std::abs(problem_.pattern.output_scale) * p * exponent_size * dout_.largest[t]);
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::raise_terms(const Row& row) {
  if (!row.keys.covered()) return;
  raise(terms_.out, std::abs(problem_.pattern.output_scale) * std::sqrt(row.terms.out_squares));
  raise(terms_.lse, 1 + std::abs(static_cast<double>(row.lse)) + std::sqrt(row.terms.lse_squares));
  if (!backward_) return;
  const double delta_size = dout_.norm[index(row.t)] * row.terms.out_norm;
  const double dq_of_delta = std::abs(*problem_.scale) * delta_size * row.terms.mean_key;
  raise(terms_.dq, std::sqrt(row.terms.dq_squares) + dq_of_delta);
  raise(terms_.dq_stored, dq_of_delta / std::sqrt(static_cast<double>(problem_.head_dim)));
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::write_row(const Row& row, std::int64_t batch, std::int64_t head, Result& result) {
  const std::int64_t at = ((batch * problem_.tokens + row.t) * problem_.heads + head) * problem_.head_dim;
  for (std::int64_t d = 0; d < problem_.head_dim; ++d) {
    result.out[index(at + d)] = arithmetic_.store_result(row.out[index(d)]);
    if (backward_) result.dq[index(at + d)] = arithmetic_.store_result(row.dq[index(d)]);
  }
  result.lse[index((batch * problem_.heads + head) * problem_.tokens + row.t)] = row.lse;
  if constexpr (Arithmetic::kMeasuresTerms) raise_terms(row);
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::write_keys(std::int64_t batch, std::int64_t kv_head, Result& result) {
  for (std::int64_t k = 0; k < problem_.tokens; ++k) {
    const std::int64_t at = ((batch * problem_.tokens + k) * problem_.kv_heads + kv_head) * problem_.head_dim;
    for (std::int64_t d = 0; d < problem_.head_dim; ++d) {
      result.dk[index(at + d)] = arithmetic_.store_result(dk_.row(k)[d]);
      result.dv[index(at + d)] = arithmetic_.store_result(dv_.row(k)[d]);
    }
    const KeyTerms& terms = key_terms_[index(k)];
    raise(terms_.dk, std::sqrt(terms.dk_squares));
    raise(terms_.dk_stored, std::sqrt(terms.dk_stored_squares / static_cast<double>(problem_.head_dim)));
    raise(terms_.dv, std::sqrt(terms.dv_squares));
  }
}

template class HeadGroup<ExactArithmetic>;
template class HeadGroup<TextbookArithmetic>;

}  // namespace annulus::reference
