// Where transports meet the CUDA backend: neither knows the other.
#include "annulus/device_transports.h"

#include "kernels/cuda/load.h"
#include "transport/nccl.h"
#include "transport/staged.h"
#include "transport/thread_boxes.h"

namespace annulus {

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

}  // namespace annulus
