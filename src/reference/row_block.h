// Attention of a block of rows of one query head, in any arithmetic.
//
// A row is done in one go: all its logits, their softmax (eq. 4), its output (eq. 5), its part of the gradients (eq. 6
// to 8). Rows go in blocks and keys in chunks for one reason alone: a chunk of K or V then serves the whole block from
// the cache. Each row still meets its keys in rising order, and each key its rows, so neither size changes a bit of the
// result.
//
// An Arithmetic has `Real`, the type of all sums, and says how an intermediate and how a result are stored.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "annulus/problem.h"
#include "numeric/half.h"
#include "reference/keys.h"
#include "reference/reference.h"
#include "reference/row_sums.h"

namespace annulus::reference {

// fp64, and nothing is rounded on the way.
struct ExactArithmetic {
  using Real = double;
  static constexpr bool kMeasuresTerms = true;

  double store(double x) const { return x; }
  void store(std::vector<double>&) const {}
  double store_result(double x) const { return x; }
};

// fp32 sums; what a program would keep in memory is rounded to the input type.
struct TextbookArithmetic {
  using Real = float;
  static constexpr bool kMeasuresTerms = false;
  DType dtype = DType::fp32;

  float store(float x) const { return held(x, round_to(dtype, x)); }
  void store(std::vector<float>& values) const;
  float store_result(float x) const { return round_to(dtype, x); }

 private:
  static float held(float x, float rounded) { return std::isinf(rounded) ? x : rounded; }
};

// Memory that begins at a cache line, so that rows of 64 bytes lie in one.
template <class Real>
struct CacheLineAllocator {
  using value_type = Real;
  static constexpr std::align_val_t kLine{64};

  CacheLineAllocator() = default;
  template <class Other>
  explicit CacheLineAllocator(const CacheLineAllocator<Other>&) {}
  Real* allocate(std::size_t count) { return static_cast<Real*>(::operator new(count * sizeof(Real), kLine)); }
  void deallocate(Real* data, std::size_t) { ::operator delete(data, kLine); }
  bool operator==(const CacheLineAllocator&) const = default;
};

// [rows, columns]
template <class Real>
class Matrix {
 public:
  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t columns)
      : columns_(columns), values_(static_cast<std::size_t>(rows * columns)) {}
  Real* row(std::int64_t i) { return values_.data() + i * columns_; }
  const Real* row(std::int64_t i) const { return values_.data() + i * columns_; }

 private:
  std::int64_t columns_ = 0;
  std::vector<Real, CacheLineAllocator<Real>> values_;
};

// One head of a tensor [batch, tokens, heads, head_dim] as [tokens, head_dim], with what the sizes of terms are made
// of.
template <class Real>
struct Head {
  Matrix<Real> rows;
  std::vector<double> largest;  // max |x| by row
  std::vector<double> norm;     // Euclidean, by row

  Head() = default;
  Head(const std::vector<double>& tensor, std::int64_t batch, std::int64_t head, std::int64_t heads,
       const Problem& problem);
};

template <class Real>
struct QueryHead {
  std::int64_t head;  // of the problem
  Head<Real> q;
  Head<Real> dout;  // empty: forward alone
};

// Of one query: what TermSizes is made of. Errors of different keys are independent, so their squares add up; entries
// of one key, in several branches, share its error.
struct RowTerms {
  double out_norm = 0;     // Euclidean, of the output
  double out_squares = 0;  // of P * logit_size * max|v|
  double lse_squares = 0;  // of P * logit_size
  double dq_squares = 0;   // of what an fp32 dS may be off by, times max|k|
  double mean_key = 0;     // sum P max|k|: how far an error of Delta, common to all keys, moves dQ
};

// Of one key, likewise.
struct KeyTerms {
  double dk_squares = 0;
  double dk_stored_squares = 0;
  double dv_squares = 0;
};

template <class Real>
struct KeyGradients {
  Matrix<Real> dk, dv;
  std::vector<KeyTerms> terms;  // by key
};

template <class Real>
struct KeyHead {
  Head<Real> k, v;
};

// Sizes pass over NaN and infinities: those have none, and are compared by kind.
inline void raise(double& highest, double x) {
  if (std::isfinite(x) && x > highest) highest = x;
}

template <class Arithmetic>
class RowBlock {
 public:
  using Real = typename Arithmetic::Real;
  static constexpr std::int64_t kRows = 32;

  RowBlock(const Problem& problem, const KeySets& key_sets, Arithmetic arithmetic, bool backward)
      : problem_(problem), key_sets_(key_sets), arithmetic_(arithmetic), backward_(backward) {}

  // Rows [first, first + kRows), or as many as there are: everything but dK and dV. Both heads must live until the
  // calls below are through.
  void attend(const QueryHead<Real>& queries, const KeyHead<Real>& keys, std::int64_t first);

  // Rows must come to a key in order: call this for one block after the other.
  void add_to(KeyGradients<Real>& gradients);

  void write(std::int64_t batch, Result& result, TermSizes& terms) const;

 private:
  static constexpr std::int64_t kChunkBytes = 16 << 10;  // of K or V: half a level-1 cache

  // Some keys of a row, those of one branch, and their probability within the branch.
  struct BranchKeys {
    std::vector<std::int64_t> key;
    std::vector<Real> probability;
    std::size_t next = 0;  // the first that for_each_chunk has not come to
  };

  struct Row {
    std::int64_t t = 0;
    RowKeys keys;
    std::size_t next = 0;  // as in BranchKeys
    // By entry of `keys`:
    std::vector<Real> score;
    std::vector<Real> probability;    // of eq. 5, over the union of all branches
    std::vector<Real> d_probability;  // dP
    std::vector<Real> d_score;        // dS
    std::vector<double> logit_size;   // how far rounding may move a logit; only where terms are measured
    std::vector<double> dp_error;     // dP - Delta, likewise
    // By branch:
    std::vector<BranchKeys> branch_keys;  // detached gradient only
    Matrix<Real> branch_out;              // O_i of eq. 8
    std::vector<Real> delta;              // Delta of eq. 7 (the same for all) or 8
    Real lse = 0;
    std::vector<Real> out;  // eq. 5; from finish_output on times output_scale
    std::vector<Real> dq;
    RowTerms terms;
  };

  // The entries of all rows once more, by key; rows rise within a key.
  struct EntriesByKey {
    std::int64_t begin = 0;          // the lowest key
    std::vector<std::size_t> first;  // by key - begin: its first entry; and the end
    std::vector<std::int64_t> row;   // within the block
    std::vector<Real> probability;
    std::vector<Real> d_score;
  };

  void start_row(std::int64_t t, Row& row) const;
  void find_scores();
  void find_probabilities(Row& row) const;
  void find_outputs();
  void finish_output(Row& row) const;
  void find_query_gradients();
  void sort_by_key();
  void add_by_key(const std::vector<Real>& factor, const Real* rows, Matrix<Real>& sum) const;
  void measure_output(Row& row) const;
  void measure_query_gradient(Row& row) const;
  void measure_key_gradients(const Row& row, std::vector<KeyTerms>& terms) const;
  void raise_terms(const Row& row, TermSizes& terms) const;

  double delta_size(const Row& row) const {
    return queries_->dout.norm[static_cast<std::size_t>(row.t)] * row.terms.out_norm;
  }

  // visit(row, end) for each row, with `end` rising: what concerns keys below it and has not been done, is to be done.
  template <class Visit>
  void for_each_chunk(Visit visit);

  ListedRows<Real> listed(const Matrix<Real>& matrix, const std::int64_t* rows, std::size_t count) const {
    return {matrix.row(0), static_cast<std::size_t>(problem_.head_dim), rows, count};
  }
  bool detached() const { return backward_ && problem_.pattern.gradient == Gradient::detached; }
  Real store(Real x) const { return arithmetic_.store(x); }
  Real scale() const { return static_cast<Real>(*problem_.scale); }

  const Problem& problem_;
  const KeySets& key_sets_;
  Arithmetic arithmetic_;
  bool backward_;

  const QueryHead<Real>* queries_ = nullptr;
  const KeyHead<Real>* keys_ = nullptr;
  std::int64_t first_ = 0;
  std::vector<Row> rows_;
  Matrix<Real> dout_;  // of the block's rows, output_scale * dO: the gradient of eq. 5
  EntriesByKey by_key_;
};

}  // namespace annulus::reference
