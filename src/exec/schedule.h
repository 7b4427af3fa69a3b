// Schedule: the exchanges of one rank, one after the other.
//
// What a step of the plan moves may be larger than a slot is allowed to be, so everything travels in equal slices:
// exchange e = 1, 2, ... moves slice (e - 1) / (steps - 1) of step 1 + (e - 1) % (steps - 1). All ranks count alike,
// though many an exchange is empty for one of them. Gradients of what exchange e brought are complete when it has been
// computed; they go home in exchange e + kReturnLag, and by then e + 1 is under way already.
#pragma once

#include <cstdint>

#include "plan/rank_plan.h"

namespace annulus {

class Schedule {
 public:
  static constexpr std::int64_t kReturnLag = 2;

  Schedule(const Problem& problem, const Sharding& sharding, Strategy strategy, int rank, std::int64_t slot_bytes,
           Cargo cargo = Cargo::keys);

  const std::vector<Rows>& pieces() const { return plan_.pieces; }
  std::int64_t count() const { return slices_ * (static_cast<std::int64_t>(plan_.steps.size()) - 1); }
  std::int64_t slices() const { return slices_; }
  const std::vector<Step>& steps() const { return plan_.steps; }  // whole
  // Empty outside [1, count()].
  Step exchange(std::int64_t e) const;
  // Whether this rank neither sends nor receives anything.
  bool is_empty() const;
  // The last exchange that brings this rank anything; 0 when none does.
  std::int64_t last_receive() const { return last_receive_; }

 private:
  RankPlan plan_;
  std::int64_t slices_ = 1;
  std::int64_t last_receive_ = 0;
};

}  // namespace annulus
