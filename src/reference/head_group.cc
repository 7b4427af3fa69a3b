#include "reference/head_group.h"

#include <algorithm>
#include <thread>

namespace annulus::reference {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

void raise(TermSizes& sizes, const TermSizes& other) {
  sizes.out = std::max(sizes.out, other.out);
  sizes.lse = std::max(sizes.lse, other.lse);
  sizes.dq = std::max(sizes.dq, other.dq);
  sizes.dk = std::max(sizes.dk, other.dk);
  sizes.dv = std::max(sizes.dv, other.dv);
  sizes.dq_stored = std::max(sizes.dq_stored, other.dq_stored);
  sizes.dk_stored = std::max(sizes.dk_stored, other.dk_stored);
}

template <class Arithmetic>
TermSizes HeadGroup<Arithmetic>::attend(std::int64_t batch, std::int64_t kv_head, Result& result) {
  load(batch, kv_head);
  {
    const std::int64_t blocks = std::ssize(queries_) * blocks_of_head();
    std::vector<std::jthread> pool;
    for (std::int64_t i = 1; i < std::min<std::int64_t>(threads_, blocks); ++i)
      pool.emplace_back([&] { work(batch, result); });
    work(batch, result);
  }
  if (failure_) std::rethrow_exception(failure_);
  if (backward_) write_keys(batch, kv_head, result);
  return terms_;
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::load(std::int64_t batch, std::int64_t kv_head) {
  const std::int64_t group = problem_.heads / problem_.kv_heads;
  keys_ = {.k = Head<Real>(inputs_.k, batch, kv_head, problem_.kv_heads, problem_),
           .v = Head<Real>(inputs_.v, batch, kv_head, problem_.kv_heads, problem_)};
  queries_.clear();
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    queries_.push_back({.head = head, .q = Head<Real>(inputs_.q, batch, head, problem_.heads, problem_), .dout = {}});
    if (backward_) queries_.back().dout = Head<Real>(inputs_.dout, batch, head, problem_.heads, problem_);
  }
  if (backward_)
    gradients_ = {.dk = Matrix<Real>(problem_.tokens, problem_.head_dim),
                  .dv = Matrix<Real>(problem_.tokens, problem_.head_dim),
                  .terms = std::vector<KeyTerms>(index(problem_.tokens))};
  terms_ = {};
  next_block_ = turn_ = 0;
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::work(std::int64_t batch, Result& result) {
  try {
    RowBlock<Arithmetic> block(problem_, key_sets_, arithmetic_, backward_);
    TermSizes terms;
    for (std::int64_t i = next_block_++; i < std::ssize(queries_) * blocks_of_head(); i = next_block_++) {
      block.attend(queries_[index(i / blocks_of_head())], keys_, i % blocks_of_head() * RowBlock<Arithmetic>::kRows);
      block.write(batch, result, terms);
      if (!backward_) continue;
      if (!wait_for_turn(i)) return;
      block.add_to(gradients_);
      end_turn();
    }
    const std::lock_guard lock(mutex_);
    raise(terms_, terms);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    turn_ended_.notify_all();
  }
}

template <class Arithmetic>
bool HeadGroup<Arithmetic>::wait_for_turn(std::int64_t block) {
  std::unique_lock lock(mutex_);
  turn_ended_.wait(lock, [&] { return turn_ == block || failure_ != nullptr; });
  return failure_ == nullptr;
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::end_turn() {
  {
    const std::lock_guard lock(mutex_);
    ++turn_;
  }
  turn_ended_.notify_all();
}

template <class Arithmetic>
void HeadGroup<Arithmetic>::write_keys(std::int64_t batch, std::int64_t kv_head, Result& result) {
  for (std::int64_t k = 0; k < problem_.tokens; ++k) {
    const std::int64_t at = ((batch * problem_.tokens + k) * problem_.kv_heads + kv_head) * problem_.head_dim;
    for (std::int64_t d = 0; d < problem_.head_dim; ++d) {
      result.dk[index(at + d)] = arithmetic_.store_result(gradients_.dk.row(k)[d]);
      result.dv[index(at + d)] = arithmetic_.store_result(gradients_.dv.row(k)[d]);
    }
    const KeyTerms& terms = gradients_.terms[index(k)];
    raise(terms_.dk, std::sqrt(terms.dk_squares));
    raise(terms_.dk_stored, std::sqrt(terms.dk_stored_squares / static_cast<double>(problem_.head_dim)));
    raise(terms_.dv, std::sqrt(terms.dv_squares));
  }
}

template class HeadGroup<ExactArithmetic>;
template class HeadGroup<TextbookArithmetic>;

}  // namespace annulus::reference
