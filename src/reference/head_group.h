// Attention of the query heads that share one key/value head of one batch element, row by row, in any arithmetic.
//
// A row is done in one go: all its logits, their softmax (eq. 4), its output (eq. 5), its part of the gradients (eq. 6
// to 8). Rows go in blocks and keys in chunks for one reason alone: a chunk of K and V then serves the whole block from
// the cache. Each row still meets its keys in rising order, so the block size does not change a bit of the result.
//
// An Arithmetic has `Real`, the type of all sums, and says how an intermediate and how a result are stored.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "annulus/problem.h"
#include "numeric/half.h"
#include "reference/keys.h"
#include "reference/reference.h"

namespace annulus::reference {

// fp64, and nothing is rounded on the way.
struct ExactArithmetic {
  using Real = double;
  static constexpr bool kMeasuresTerms = true;

  double store(double x) const { return x; }
  double store_result(double x) const { return x; }
};

// fp32 sums; what a program would keep in memory is rounded to the input type.
struct TextbookArithmetic {
  using Real = float;
  static constexpr bool kMeasuresTerms = false;
  DType dtype = DType::fp32;

  float store(float x) const {
    const float rounded = round_to(dtype, x);
    return std::isinf(rounded) ? x : rounded;
  }
  float store_result(float x) const { return round_to(dtype, x); }
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
  std::vector<Real> values_;
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

// Of one query: what TermSizes is made of. Errors of different keys are independent, so their squares add up.
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

template <class Arithmetic>
class HeadGroup {
 public:
  using Real = typename Arithmetic::Real;

  HeadGroup(const Problem& problem, const Inputs& inputs, const KeySets& key_sets, Arithmetic arithmetic)
      : problem_(problem),
        inputs_(inputs),
        key_sets_(key_sets),
        arithmetic_(arithmetic),
        backward_(!inputs.dout.empty()) {}

  // Writes its own heads of `result`, and nothing of result.terms: those are returned.
  TermSizes attend(std::int64_t batch, std::int64_t kv_head, Result& result);

 private:
  static constexpr std::int64_t kBlockRows = 32;
  static constexpr std::int64_t kChunkKeys = 8;

  struct Row {
    std::int64_t t = 0;
    RowKeys keys;
    std::size_t next = 0;  // the first entry that for_each_pair has not come to
    // By entry of `keys`:
    std::vector<Real> score;
    std::vector<Real> probability;         // of eq. 5, over the union of all branches
    std::vector<Real> branch_probability;  // within the entry's own branch; detached gradient only
    std::vector<Real> d_probability;       // dP
    // By branch:
    Matrix<Real> branch_out;  // O_i of eq. 8
    std::vector<Real> delta;  // Delta of eq. 7 (the same for all) or 8
    Real lse = 0;
    std::vector<Real> out;   // eq. 5; from finish_output on times output_scale
    std::vector<Real> dout;  // output_scale * dO: the gradient of eq. 5
    std::vector<Real> dq;
    RowTerms terms;
  };

  void attend_block(std::int64_t first, std::int64_t head);
  void start_row(std::int64_t t, std::int64_t head, Row& row) const;
  Real normalise(const Row& row, int branch, std::vector<Real>& probability) const;
  void finish_output(Row& row) const;
  void add_gradients(Row& row, std::size_t entry);
  double logit_size(const Row& row, std::size_t entry) const;
  void measure_output(Row& row, std::size_t entry) const;
  void measure_gradients(Row& row, std::size_t entry);
  void raise_terms(const Row& row);
  void write_row(const Row& row, std::int64_t batch, std::int64_t head, Result& result);
  void write_keys(std::int64_t batch, std::int64_t kv_head, Result& result);

  template <class Visit>
  void for_each_pair(Visit visit);

  static constexpr int kAllBranches = -1;

  bool detached() const { return backward_ && problem_.pattern.gradient == Gradient::detached; }
  Real store(Real x) const { return arithmetic_.store(x); }
  Real scale() const { return static_cast<Real>(*problem_.scale); }

  const Problem& problem_;
  const Inputs& inputs_;
  const KeySets& key_sets_;
  Arithmetic arithmetic_;
  bool backward_;

  Head<Real> q_, k_, v_, dout_;
  Matrix<Real> dk_, dv_;
  std::vector<KeyTerms> key_terms_;
  std::vector<Row> block_;
  TermSizes terms_;
};

}  // namespace annulus::reference
