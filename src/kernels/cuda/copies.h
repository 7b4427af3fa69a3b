// DeviceCopies (transport/device_copies.h) on a CUDA device.
#pragma once

#include <memory>

#include "transport/device_copies.h"

namespace annulus::cuda {

std::unique_ptr<DeviceCopies> make_copies(int device, int lanes);

}  // namespace annulus::cuda
