// exact and textbook: one piece of work for every key/value head of every batch element, shared out to threads. Pieces
// write disjoint parts of the result, so it does not depend on the number of threads. Where there are more threads than
// pieces, some share a piece.
#include "reference/reference.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "annulus/errors.h"
#include "reference/head_group.h"
#include "reference/keys.h"

namespace annulus::reference {
namespace {

void check_size(const char* name, std::size_t got, std::int64_t want) {
  if (got == static_cast<std::size_t>(want)) return;
  throw InvalidArgument(std::string("the reference needs dense tensors of the problem's shape; got ") + name +
                        " with " + std::to_string(got) + " values: give " + std::to_string(want));
}

void check_sizes(const Problem& problem, const Inputs& inputs) {
  const std::int64_t rows = problem.batch * problem.tokens;
  const std::int64_t query_size = rows * problem.heads * problem.head_dim;
  const std::int64_t key_size = rows * problem.kv_heads * problem.head_dim;
  check_size("q", inputs.q.size(), query_size);
  check_size("k", inputs.k.size(), key_size);
  check_size("v", inputs.v.size(), key_size);
  if (!inputs.dout.empty()) check_size("dout", inputs.dout.size(), query_size);
}

Result empty_result(const Problem& problem, const Inputs& inputs) {
  Result result;
  result.out.resize(inputs.q.size());
  result.lse.resize(static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens));
  if (inputs.dout.empty()) return result;
  result.dq.resize(inputs.q.size());
  result.dk.resize(inputs.k.size());
  result.dv.resize(inputs.v.size());
  return result;
}

template <class Arithmetic>
Result attend(const Problem& problem, const Inputs& inputs, Arithmetic arithmetic, int threads) {
  check_sizes(problem, inputs);
  Result result = empty_result(problem, inputs);
  const KeySets key_sets(problem);
  const std::int64_t pieces = problem.batch * problem.kv_heads;
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const auto workers = static_cast<int>(std::min<std::int64_t>(threads, std::max<std::int64_t>(1, pieces)));
  std::atomic<std::int64_t> next_piece = 0;
  std::mutex mutex;
  std::exception_ptr failure;

  const auto work = [&] {
    try {
      HeadGroup<Arithmetic> group(problem, inputs, key_sets, arithmetic, threads / workers);
      for (std::int64_t piece = next_piece++; piece < pieces; piece = next_piece++) {
        const TermSizes terms = group.attend(piece / problem.kv_heads, piece % problem.kv_heads, result);
        const std::lock_guard lock(mutex);
        raise(result.terms, terms);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> pool;
    for (int i = 1; i < workers; ++i) pool.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
  return result;
}

}  // namespace

Result exact(const Problem& problem, const Inputs& inputs, int threads) {
  return attend(problem, inputs, ExactArithmetic{}, threads);
}

Result textbook(const Problem& problem, const Inputs& inputs, int threads) {
  return attend(problem, inputs, TextbookArithmetic{problem.dtype}, threads);
}

}  // namespace annulus::reference
