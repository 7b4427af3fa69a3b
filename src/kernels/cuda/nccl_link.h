// DeviceLink (transport/device_link.h) over NCCL, which is opened when it is first asked for.
#pragma once

#include "transport/device_link.h"

namespace annulus::cuda {

LinkMaker nccl_links(int device);

}  // namespace annulus::cuda
