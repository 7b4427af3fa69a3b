// Where transports meet the CUDA backend: neither knows the other.
#include "annulus/device_transports.h"

#include <algorithm>
#include <sstream>

#include "kernels/cuda/load.h"
#include "transport/nccl.h"
#include "transport/staged.h"
#include "transport/thread_boxes.h"

namespace annulus {
namespace {

constexpr const char* kHeading = "payload";

const char* name(Payload payload) {
  return payload == Payload::automatic ? "auto" : payload == Payload::staged ? "staged" : "nccl";
}

// Of two ranks with one GPU NCCL would have none start.
bool has_twins(std::vector<std::string> gpus) {
  std::ranges::sort(gpus);
  return std::ranges::adjacent_find(gpus) != gpus.end();
}

// What each rank says: a heading, its wish, whether it has NCCL, and its GPU, a line each.
Payload decide(Transport& control, const LinkMaker& maker, Payload wanted) {
  const std::vector<std::string> texts = control.all_gather(std::string(kHeading) + "\n" + name(wanted) + "\n" +
                                                            (maker.trouble.empty() ? "yes" : "no") + "\n" + maker.gpu);
  std::vector<std::string> gpus;
  bool everywhere = true;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream text(texts[rank]);
    std::string heading, wish, has_nccl;
    std::getline(text, heading);
    std::getline(text, wish);
    std::getline(text, has_nccl);
    std::getline(text, gpus.emplace_back(), '\0');
    if (heading != kHeading || wish != name(wanted)) {
      const std::string reason = "all ranks must move the payload of GPUs alike; got " + std::string(name(wanted)) +
                                 " on rank " + std::to_string(control.rank()) + " and " +
                                 (heading == kHeading ? wish : "something else, or the CPU,") + " on rank " +
                                 std::to_string(rank) + ": give every rank the same device and payload";
      control.abort(reason);
      throw TransportError(reason);
    }
    everywhere = everywhere && has_nccl == "yes";
  }
  if (wanted != Payload::automatic) return wanted;
  return everywhere && !has_twins(gpus) ? Payload::nccl : Payload::staged;
}

}  // namespace

std::vector<std::unique_ptr<Transport>> make_device_thread_group(int size, const std::vector<int>& devices,
                                                                 const TransportOptions& options) {
  if (size < 1) throw InvalidArgument("a group has 1 rank or more; got " + std::to_string(size));
  if (devices.size() != static_cast<std::size_t>(size))
    throw InvalidArgument("every rank of a group has a device; got " + std::to_string(devices.size()) +
                          " devices for " + std::to_string(size) + " ranks: name one for each");
  const cuda::Backend& backend = cuda::load_backend();
  std::vector<std::unique_ptr<DeviceCopies>> copies;
  for (const int device : devices) copies.push_back(backend.copies(device, size));
  return make_thread_group(std::move(copies), options);
}

std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> host, int device,
                                                 const StagingOptions& options) {
  return make_staged_transport(std::move(host), cuda::load_backend().copies(device, 2), options);
}

std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> control, int device,
                                               const NcclOptions& options) {
  const cuda::Backend& backend = cuda::load_backend();
  return make_nccl_transport(std::move(control), backend.copies(device, 2), backend.nccl_links(device), options);
}

std::unique_ptr<Transport> make_device_transport(std::unique_ptr<Transport> control, int device,
                                                 const PayloadOptions& options) {
  const cuda::Backend& backend = cuda::load_backend();
  if (decide(*control, backend.nccl_links(device), options.payload) == Payload::nccl)
    return make_nccl_transport(std::move(control), device, {.timeout = options.timeout});
  return make_staged_transport(std::move(control), device);
}

}  // namespace annulus
