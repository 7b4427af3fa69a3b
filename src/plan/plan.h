// Plan: what one rank computes, as plain data from a pure function of the problem.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/problem.h"
#include "plan/task.h"

namespace annulus {

// Positions [begin, end) whose tasks are tasks[first_task, last_task): no task reaches outside its span.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t first_task = 0;
  std::int64_t last_task = 0;
};

struct Plan {
  std::vector<Span> spans;  // in order, without gaps; one per non-empty document
  std::vector<Task> tasks;  // within a span by branch, then by position; at most two a branch
};

// Takes a resolved problem.
Plan make_plan(const Problem& problem);

// Whether branches have a Delta of their own (eq. 8). To a head that takes part in one of them eq. 7 says the same.
bool has_branch_deltas(const Problem& problem);

// For people: the branches, their tasks and what they cost.
std::string explain(const Plan& plan, const Problem& problem);

}  // namespace annulus
