// GPU memory over a transport of the host, in pieces: device_transports.h.
#pragma once

#include "annulus/device_transports.h"
#include "transport/device_copies.h"

namespace annulus {

// The copies have two lanes.
std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> host, std::unique_ptr<DeviceCopies> copies,
                                                 const StagingOptions& options);

}  // namespace annulus
