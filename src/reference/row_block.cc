#include "reference/row_block.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace annulus::reference {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

void add_square(double& sum, double x) {
  if (std::isfinite(x)) sum += x * x;
}

// Sizes of errors of a row's entries, in their order: those of one key share an error and add up, those of different
// keys in squares.
class ErrorSum {
 public:
  explicit ErrorSum(const RowKeys& keys) : key_(keys.key) {}
  void add(std::size_t entry, double size, double& squares) {
    of_key_ += size;
    const bool goes_on = entry + 1 < key_.size() && key_[entry + 1] == key_[entry];
    if (!goes_on) add_square(squares, std::exchange(of_key_, 0));
  }

 private:
  const std::vector<std::int64_t>& key_;
  double of_key_ = 0;
};

// Equation 4 and the weights of eq. 5 over some scores; returns the log of the denominator.
template <class Real>
Real normalise(const std::vector<Real>& score, std::int64_t zero_keys, std::vector<Real>& probability) {
  Real highest = zero_keys > 0 ? Real{0} : -std::numeric_limits<Real>::infinity();
  for (const Real x : score) highest = x > highest ? x : highest;
  const Real shift = std::isinf(highest) && highest < 0 ? Real{0} : highest;

  for (std::size_t e = 0; e < score.size(); ++e) probability[e] = std::exp(score[e] - shift);
  Real sum = zero_keys > 0 ? static_cast<Real>(zero_keys) * std::exp(-shift) : Real{0};
  for (const Real p : probability) sum += p;
  for (Real& p : probability) p /= sum;
  return shift + std::log(sum);
}

// The entries from `next` on whose keys, which rise, are below `end`; `next` moves on.
struct Stretch {
  std::size_t from, count;
};

Stretch take(const std::vector<std::int64_t>& key, std::size_t& next, std::int64_t end) {
  const std::size_t from = next;
  while (next < key.size() && key[next] < end) ++next;
  return {from, next - from};
}

}  // namespace

void TextbookArithmetic::store(std::vector<float>& values) const {
  if (dtype == DType::bf16) {
    for (float& x : values) x = held(x, round_to(DType::bf16, x));
  } else if (dtype == DType::fp16) {
    for (float& x : values) x = held(x, round_to(DType::fp16, x));
  }
}

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
void RowBlock<Arithmetic>::attend(const QueryHead<Real>& queries, const KeyHead<Real>& keys, std::int64_t first) {
  queries_ = &queries;
  keys_ = &keys;
  first_ = first;
  rows_.resize(index(std::min(kRows, problem_.tokens - first)));
  if (backward_) dout_ = Matrix<Real>(kRows, problem_.head_dim);
  for (std::size_t i = 0; i < rows_.size(); ++i) start_row(first + static_cast<std::int64_t>(i), rows_[i]);
  find_scores();
  for (Row& row : rows_) find_probabilities(row);
  find_outputs();
  for (Row& row : rows_) finish_output(row);
  if (backward_) find_query_gradients();
}

template <class Arithmetic>
void RowBlock<Arithmetic>::start_row(std::int64_t t, Row& row) const {
  row.t = t;
  key_sets_.collect(t, queries_->head, row.keys);
  const std::size_t entries = row.keys.key.size();
  row.score.resize(entries);
  row.probability.resize(entries);
  row.out.assign(index(problem_.head_dim), 0);
  row.terms = {};
  if constexpr (Arithmetic::kMeasuresTerms) row.logit_size.resize(entries);
  if (!backward_) return;
  if constexpr (Arithmetic::kMeasuresTerms) row.dp_error.resize(entries);
  row.d_probability.resize(entries);
  row.d_score.resize(entries);
  row.dq.assign(index(problem_.head_dim), 0);
  row.delta.assign(problem_.pattern.branches.size(), 0);
}

template <class Arithmetic>
template <class Visit>
void RowBlock<Arithmetic>::for_each_chunk(Visit visit) {
  std::int64_t begin = problem_.tokens;
  std::int64_t end = 0;
  std::size_t most_entries = 1;
  for (Row& row : rows_) {
    row.next = 0;
    for (BranchKeys& branch : row.branch_keys) branch.next = 0;
    if (!row.keys.covered()) continue;
    begin = std::min(begin, row.keys.key.front());
    end = std::max(end, row.keys.key.back() + 1);
    most_entries = std::max(most_entries, row.keys.key.size());
  }
  // Where a row sees one position in r, a chunk has r times the positions.
  const std::int64_t row_bytes = problem_.head_dim * static_cast<std::int64_t>(sizeof(Real));
  const std::int64_t dense_keys = std::max<std::int64_t>(8, kChunkBytes / row_bytes);
  const std::int64_t chunk =
      dense_keys * std::max<std::int64_t>(1, (end - begin) / static_cast<std::int64_t>(most_entries));
  for (; begin < end; begin += chunk)
    for (Row& row : rows_) visit(row, begin + chunk);
}

template <class Arithmetic>
void RowBlock<Arithmetic>::find_scores() {
  const auto dot = [&](Row& row, std::int64_t end, const Real* x, const Matrix<Real>& matrix, std::vector<Real>& out) {
    const Stretch stretch = take(row.keys.key, row.next, end);
    dot_rows(x, listed(matrix, row.keys.key.data() + stretch.from, stretch.count), out.data() + stretch.from);
  };
  for_each_chunk(
      [&](Row& row, std::int64_t end) { dot(row, end, queries_->q.rows.row(row.t), keys_->k.rows, row.score); });
  for (Row& row : rows_) {
    for (Real& x : row.score) x *= scale();
    arithmetic_.store(row.score);
  }
  if (!backward_) return;
  const auto output_scale = static_cast<Real>(problem_.pattern.output_scale);
  for (const Row& row : rows_) {
    const Real* from = queries_->dout.rows.row(row.t);
    Real* to = dout_.row(row.t - first_);
    for (std::int64_t d = 0; d < problem_.head_dim; ++d) to[d] = store(output_scale * from[d]);
  }
  for_each_chunk(
      [&](Row& row, std::int64_t end) { dot(row, end, dout_.row(row.t - first_), keys_->v.rows, row.d_probability); });
  for (Row& row : rows_) arithmetic_.store(row.d_probability);
}

template <class Arithmetic>
void RowBlock<Arithmetic>::find_probabilities(Row& row) const {
  const std::vector<std::int64_t>& zero_keys = row.keys.zero_keys;
  row.lse = normalise(row.score, std::accumulate(zero_keys.begin(), zero_keys.end(), std::int64_t{0}), row.probability);
  arithmetic_.store(row.probability);
  if (!detached()) return;
  row.branch_keys.assign(zero_keys.size(), {});
  for (std::size_t e = 0; e < row.score.size(); ++e) {
    BranchKeys& branch = row.branch_keys[index(row.keys.branch[e])];
    branch.key.push_back(row.keys.key[e]);
    branch.probability.push_back(row.score[e]);
  }
  for (std::size_t i = 0; i < zero_keys.size(); ++i) {
    std::vector<Real>& probability = row.branch_keys[i].probability;
    normalise(std::vector<Real>(probability), zero_keys[i], probability);
    arithmetic_.store(probability);
  }
}

template <class Arithmetic>
void RowBlock<Arithmetic>::find_outputs() {
  if (detached())
    for (Row& row : rows_)
      row.branch_out = Matrix<Real>(static_cast<std::int64_t>(row.branch_keys.size()), problem_.head_dim);
  for_each_chunk([&](Row& row, std::int64_t end) {
    const Stretch all = take(row.keys.key, row.next, end);
    add_rows(row.probability.data() + all.from, listed(keys_->v.rows, row.keys.key.data() + all.from, all.count),
             row.out.data());
    if (!detached()) return;
    for (std::size_t i = 0; i < row.branch_keys.size(); ++i) {
      BranchKeys& branch = row.branch_keys[i];
      const Stretch some = take(branch.key, branch.next, end);
      add_rows(branch.probability.data() + some.from, listed(keys_->v.rows, branch.key.data() + some.from, some.count),
               row.branch_out.row(static_cast<std::int64_t>(i)));
    }
  });
  if constexpr (Arithmetic::kMeasuresTerms)
    for (Row& row : rows_) measure_output(row);
}

// O is complete: store it, and find Delta by eq. 7 or 8. Merge weights are constants in eq. 8, so each branch has its
// own.
template <class Arithmetic>
void RowBlock<Arithmetic>::finish_output(Row& row) const {
  const std::int64_t head_dim = problem_.head_dim;
  const auto dot = [&](const Real* a, const Real* b) {
    const std::int64_t first = 0;
    Real sum = 0;
    dot_rows(a, {b, index(head_dim), &first, 1}, &sum);
    return sum;
  };
  const auto output_scale = static_cast<Real>(problem_.pattern.output_scale);
  for (Real& x : row.out) x = store(output_scale * store(x));
  if constexpr (Arithmetic::kMeasuresTerms) row.terms.out_norm = std::sqrt(dot(row.out.data(), row.out.data()));
  if (!backward_) return;
  if (!detached()) {
    std::ranges::fill(row.delta, dot(queries_->dout.rows.row(row.t), row.out.data()));
    return;
  }
  for (std::size_t i = 0; i < row.delta.size(); ++i) {
    Real* branch_out = row.branch_out.row(static_cast<std::int64_t>(i));
    for (std::int64_t d = 0; d < head_dim; ++d) branch_out[d] = store(branch_out[d]);
    row.delta[i] = dot(dout_.row(row.t - first_), branch_out);
  }
}

// Equation 6: dS and dQ.
template <class Arithmetic>
void RowBlock<Arithmetic>::find_query_gradients() {
  for (Row& row : rows_) {
    for (std::size_t e = 0; e < row.d_score.size(); ++e)
      row.d_score[e] = scale() * row.probability[e] * (row.d_probability[e] - row.delta[index(row.keys.branch[e])]);
    arithmetic_.store(row.d_score);
    if constexpr (Arithmetic::kMeasuresTerms) measure_query_gradient(row);
  }
  for_each_chunk([&](Row& row, std::int64_t end) {
    const Stretch stretch = take(row.keys.key, row.next, end);
    add_rows(row.d_score.data() + stretch.from,
             listed(keys_->k.rows, row.keys.key.data() + stretch.from, stretch.count), row.dq.data());
  });
  sort_by_key();
}

template <class Arithmetic>
void RowBlock<Arithmetic>::sort_by_key() {
  by_key_.begin = problem_.tokens;
  std::int64_t end = 0;
  std::size_t entries = 0;
  for (const Row& row : rows_) {
    if (!row.keys.covered()) continue;
    by_key_.begin = std::min(by_key_.begin, row.keys.key.front());
    end = std::max(end, row.keys.key.back() + 1);
    entries += row.keys.key.size();
  }
  by_key_.row.resize(entries);
  by_key_.probability.resize(entries);
  by_key_.d_score.resize(entries);
  // Counted two places on, summed up, and used one place on: when all are placed, first[i] is where key i begins.
  std::vector<std::size_t>& first = by_key_.first;
  first.assign(index(std::max<std::int64_t>(0, end - by_key_.begin)) + 2, 0);
  for (const Row& row : rows_)
    for (const std::int64_t key : row.keys.key) ++first[index(key - by_key_.begin) + 2];
  std::partial_sum(first.begin(), first.end(), first.begin());
  for_each_chunk([&](Row& row, std::int64_t chunk_end) {
    const Stretch stretch = take(row.keys.key, row.next, chunk_end);
    for (std::size_t e = stretch.from; e < stretch.from + stretch.count; ++e) {
      const std::size_t place = first[index(row.keys.key[e] - by_key_.begin) + 1]++;
      by_key_.row[place] = row.t - first_;
      by_key_.probability[place] = row.probability[e];
      by_key_.d_score[place] = row.d_score[e];
    }
  });
}

// Equation 6: dV, then dK, so that one matrix of rows at a time passes through the cache.
template <class Arithmetic>
void RowBlock<Arithmetic>::add_to(KeyGradients<Real>& gradients) {
  add_by_key(by_key_.probability, dout_.row(0), gradients.dv);
  add_by_key(by_key_.d_score, queries_->q.rows.row(first_), gradients.dk);
  if constexpr (Arithmetic::kMeasuresTerms)
    for (const Row& row : rows_) measure_key_gradients(row, gradients.terms);
}

template <class Arithmetic>
void RowBlock<Arithmetic>::add_by_key(const std::vector<Real>& factor, const Real* rows, Matrix<Real>& sum) const {
  for (std::size_t i = 0; i + 2 < by_key_.first.size(); ++i) {
    const std::size_t from = by_key_.first[i];
    const std::size_t count = by_key_.first[i + 1] - from;
    if (count == 0) continue;
    add_rows(factor.data() + from, {rows, index(problem_.head_dim), by_key_.row.data() + from, count},
             sum.row(by_key_.begin + static_cast<std::int64_t>(i)));
  }
}

// A dot product of a and b in fp32 is off by about |a| |b| units; exp multiplies by 1 + the error of its logit.
template <class Arithmetic>
void RowBlock<Arithmetic>::measure_output(Row& row) const {
  const double norm = std::abs(*problem_.scale) * queries_->q.norm[index(row.t)];
  const double* k_norm = keys_->k.norm.data();
  const double* k_largest = keys_->k.largest.data();
  const double* v_largest = keys_->v.largest.data();
  RowTerms terms;
  ErrorSum lse(row.keys), out(row.keys);
  for (std::size_t e = 0; e < row.logit_size.size(); ++e) {
    const auto key = index(row.keys.key[e]);
    const double p = row.probability[e];
    row.logit_size[e] = 1 + std::abs(static_cast<double>(row.score[e])) + norm * k_norm[key];
    const double size = p * row.logit_size[e];
    lse.add(e, size, terms.lse_squares);
    out.add(e, size * v_largest[key], terms.out_squares);
    const double key_size = p * k_largest[key];
    if (std::isfinite(key_size)) terms.mean_key += key_size;
  }
  row.terms = terms;
}

// dP - Delta is off by its own size times that of the exponent, and by what dP was summed of.
template <class Arithmetic>
void RowBlock<Arithmetic>::measure_query_gradient(Row& row) const {
  const double lse_size = std::abs(static_cast<double>(row.lse));
  const double scale_size = std::abs(*problem_.scale);
  const double norm = std::abs(problem_.pattern.output_scale) * queries_->dout.norm[index(row.t)];
  const double* v_norm = keys_->v.norm.data();
  const double* k_largest = keys_->k.largest.data();
  double squares = 0;
  ErrorSum dq(row.keys);
  for (std::size_t e = 0; e < row.dp_error.size(); ++e) {
    const auto key = index(row.keys.key[e]);
    const double ds = row.d_probability[e] - row.delta[index(row.keys.branch[e])];
    row.dp_error[e] = (row.logit_size[e] + lse_size) * std::abs(ds) + norm * v_norm[key];
    dq.add(e, scale_size * row.probability[e] * row.dp_error[e] * k_largest[key], squares);
  }
  row.terms.dq_squares = squares;
}

template <class Arithmetic>
void RowBlock<Arithmetic>::measure_key_gradients(const Row& row, std::vector<KeyTerms>& terms) const {
  const double lse_size = std::abs(static_cast<double>(row.lse));
  const double of_delta = delta_size(row);
  const double q_size = std::abs(*problem_.scale) * queries_->q.largest[index(row.t)];
  const double dout_size = std::abs(problem_.pattern.output_scale) * queries_->dout.largest[index(row.t)];
  const std::int64_t* key = row.keys.key.data();
  const double* logit_size = row.logit_size.data();
  const double* dp_error = row.dp_error.data();
  const Real* probability = row.probability.data();
  const std::size_t entries = row.dp_error.size();
  ErrorSum dk(row.keys), dk_stored(row.keys), dv(row.keys);
  for (std::size_t e = 0; e < entries; ++e) {
    KeyTerms& of_key = terms[index(key[e])];
    const double q_error = q_size * probability[e];
    dk.add(e, q_error * (dp_error[e] + of_delta), of_key.dk_squares);
    dk_stored.add(e, q_error * of_delta, of_key.dk_stored_squares);
    dv.add(e, dout_size * probability[e] * (logit_size[e] + lse_size), of_key.dv_squares);
  }
}

template <class Arithmetic>
void RowBlock<Arithmetic>::raise_terms(const Row& row, TermSizes& terms) const {
  if (!row.keys.covered()) return;
  raise(terms.out, std::abs(problem_.pattern.output_scale) * std::sqrt(row.terms.out_squares));
  raise(terms.lse, 1 + std::abs(static_cast<double>(row.lse)) + std::sqrt(row.terms.lse_squares));
  if (!backward_) return;
  const double dq_of_delta = std::abs(*problem_.scale) * delta_size(row) * row.terms.mean_key;
  raise(terms.dq, std::sqrt(row.terms.dq_squares) + dq_of_delta);
  raise(terms.dq_stored, dq_of_delta / std::sqrt(static_cast<double>(problem_.head_dim)));
}

template <class Arithmetic>
void RowBlock<Arithmetic>::write(std::int64_t batch, Result& result, TermSizes& terms) const {
  const std::int64_t head = queries_->head;
  for (const Row& row : rows_) {
    const std::int64_t at = ((batch * problem_.tokens + row.t) * problem_.heads + head) * problem_.head_dim;
    for (std::int64_t d = 0; d < problem_.head_dim; ++d) {
      result.out[index(at + d)] = arithmetic_.store_result(row.out[index(d)]);
      if (backward_) result.dq[index(at + d)] = arithmetic_.store_result(row.dq[index(d)]);
    }
    result.lse[index((batch * problem_.heads + head) * problem_.tokens + row.t)] = row.lse;
    if constexpr (Arithmetic::kMeasuresTerms) raise_terms(row, terms);
  }
}

template struct Head<double>;
template struct Head<float>;
template class RowBlock<ExactArithmetic>;
template class RowBlock<TextbookArithmetic>;

}  // namespace annulus::reference
