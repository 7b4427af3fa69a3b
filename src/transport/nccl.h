// GPU memory over a link between GPUs, beside a transport of the host: device_transports.h.
#pragma once

#include "annulus/device_transports.h"
#include "transport/device_copies.h"
#include "transport/device_link.h"

namespace annulus {

// The copies have two lanes.
std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> control, std::unique_ptr<DeviceCopies> copies,
                                               const LinkMaker& maker, const NcclOptions& options);

}  // namespace annulus
