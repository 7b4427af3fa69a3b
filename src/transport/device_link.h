// DeviceLink: messages between the GPUs of a group, moved by the GPUs themselves: NCCL, as an interface without it. The
// CUDA backend makes it (kernels/cuda/nccl_link.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace annulus {

struct LinkMessage {
  int peer = 0;
  std::byte* data = nullptr;  // a sender's is only read
  std::int64_t bytes = 0;
};

class DeviceLink {
 public:
  virtual ~DeviceLink() = default;  // cuts it

  // Whether the link is made and all that was queued is on its stream. Throws TransportError when it has failed.
  virtual bool ready() = 0;
  // Messages that move together on a stream, where the link is ready. All ranks queue in orders that fit: a message's
  // two ends are in the first groups of both that are not finished.
  virtual void queue(std::span<const LinkMessage> sends, std::span<const LinkMessage> receives, void* stream) = 0;
  // Ends what is under way, whatever peers do.
  virtual void cut() noexcept = 0;
};

// What makes links, and what ranks tell each other about it first.
struct LinkMaker {
  std::string trouble;                  // why there can be no link here; empty: nothing
  std::string gpu;                      // where the rank's GPU is: no two ranks have the same
  std::string text;                     // of the same, for people
  std::function<std::string()> new_id;  // one rank's, for all
  std::function<std::unique_ptr<DeviceLink>(const std::string& id, int rank, int size)> link;
};

}  // namespace annulus
