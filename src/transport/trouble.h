// What a transport says when things go wrong: one wording for all transports. Every rank of a group gets the same
// sentence, so that logs of many ranks can be compared.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/transport.h"
#include "transport/vigil.h"

namespace annulus {

// What both ends of a message say about it before it moves.
struct Frame {
  std::uint64_t plan = 0;
  std::int64_t step = -1;  // -1: before the first one
  std::int64_t bytes = 0;

  bool operator==(const Frame&) const = default;
};

// The plan of the exchanges that gather texts: their steps are rounds.
inline constexpr std::uint64_t kGatherPlan = 0x616c6c5f67617468;

std::string place(const Frame& at);                                 // at step 3
std::string seconds(std::chrono::steady_clock::duration duration);  // 0.25 s

std::string disagreement(int sender, const Frame& sent, int receiver, const Frame& expected);
std::string disagreement_on_memory(int sender, const Frame& sent, int receiver);
std::string gave_up(int rank, const Frame& at, const std::string& reason);
std::string told_to_stop(int rank, const Frame& at, std::vector<int> waits_for);
std::string left_unfinished(int rank, const Frame& at);

// The verdict of rank `rank`, which waits at `at`. The report is the last one of the rank that it is about.
std::string describe(const Vigil::Verdict& verdict, const Report& report, int rank, const Frame& at,
                     std::chrono::milliseconds timeout);

// Throws InvalidArgument unless there can be such a rank.
void check_rank(int rank, int size);
// Throws InvalidArgument unless the exchange keeps the rules of transport.h.
void check_exchange(const Exchange& exchange, int rank, int size);
// For transports that move memory of the host.
void check_host_memory(const Exchange& exchange, std::string_view transport);

}  // namespace annulus
