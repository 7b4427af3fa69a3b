// Small questions about the messages of a step.
#pragma once

#include <algorithm>
#include <vector>

#include "plan/rank_plan.h"

namespace annulus {

inline std::vector<Parcel> parcels_for(const std::vector<Message>& messages, int peer) {
  for (const Message& message : messages)
    if (message.peer == peer) return message.parcels;
  return {};
}

inline std::vector<int> peers_of(const std::vector<Message>& some, const std::vector<Message>& others) {
  std::vector<int> peers;
  for (const auto* messages : {&some, &others})
    for (const Message& message : *messages)
      if (std::find(peers.begin(), peers.end(), message.peer) == peers.end()) peers.push_back(message.peer);
  return peers;
}

}  // namespace annulus
