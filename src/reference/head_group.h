// Attention of the query heads that share one key/value head of one batch element, by blocks of rows.
//
// Threads take blocks in order. Blocks add to dK and dV in order too, each waiting for its turn, so the result does not
// depend on the number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "reference/row_block.h"

namespace annulus::reference {

template <class Arithmetic>
class HeadGroup {
 public:
  using Real = typename Arithmetic::Real;

  HeadGroup(const Problem& problem, const Inputs& inputs, const KeySets& key_sets, Arithmetic arithmetic, int threads)
      : problem_(problem),
        inputs_(inputs),
        key_sets_(key_sets),
        arithmetic_(arithmetic),
        threads_(threads),
        backward_(!inputs.dout.empty()) {}

  // Writes its own heads of `result`, and nothing of result.terms: those are returned.
  TermSizes attend(std::int64_t batch, std::int64_t kv_head, Result& result);

 private:
  std::int64_t blocks_of_head() const {
    return (problem_.tokens + RowBlock<Arithmetic>::kRows - 1) / RowBlock<Arithmetic>::kRows;
  }
  void load(std::int64_t batch, std::int64_t kv_head);
  void work(std::int64_t batch, Result& result);
  void write_keys(std::int64_t batch, std::int64_t kv_head, Result& result);
  bool wait_for_turn(std::int64_t block);  // false: some thread has failed
  void end_turn();

  const Problem& problem_;
  const Inputs& inputs_;
  const KeySets& key_sets_;
  Arithmetic arithmetic_;
  int threads_;
  bool backward_;

  std::vector<QueryHead<Real>> queries_;
  KeyHead<Real> keys_;
  KeyGradients<Real> gradients_;
  TermSizes terms_;

  std::atomic<std::int64_t> next_block_ = 0;
  std::mutex mutex_;  // of what follows, and of terms_
  std::condition_variable turn_ended_;
  std::int64_t turn_ = 0;  // the block that may add to gradients_
  std::exception_ptr failure_;
};

void raise(TermSizes& sizes, const TermSizes& other);

}  // namespace annulus::reference
