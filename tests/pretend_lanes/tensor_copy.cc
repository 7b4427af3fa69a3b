#include "pretend_lanes/tensor_copy.h"

#include <cstring>

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t dimensions, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  const auto fits = [&] {
    if (dimensions != 5 || box[0] != 64 || box[1] > 256 || box[2] != 1 || box[3] != 1 || box[4] != 1) return false;
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return false;
    for (int i = 0; i < 5; ++i)
      if (sizes[i] == 0 || sizes[i] > std::uint64_t{1} << 32) return false;
    for (int i = 0; i < 4; ++i)
      if (strides[i] % 16 != 0 || strides[i] >= std::uint64_t{1} << 40) return false;
    return true;
  };
  if (!fits()) return CUDA_ERROR_INVALID_VALUE;
  map->data = static_cast<const std::byte*>(data);
  std::memcpy(map->sizes, sizes, sizeof map->sizes);
  std::memcpy(map->stride_bytes, strides, sizeof map->stride_bytes);
  map->box_rows = box[1];
  return CUDA_SUCCESS;
}

namespace annulus::machine {

void copy_tensor(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, const std::array<int, 5>& at) {
  constexpr std::uint32_t kRowBytes = 128;
  if (to % kRowBytes != 0) fail("a tensor copy to an address that is no multiple of 128");
  const std::uint32_t bytes = map.box_rows * kRowBytes;
  shared_place(to, bytes);  // all of it
  copy_later(
      [=] {
        bool inside = at[0] >= 0 && static_cast<std::uint64_t>(at[0]) < map.sizes[0];
        for (std::size_t i = 2; i < 5; ++i)
          inside = inside && at[i] >= 0 && static_cast<std::uint64_t>(at[i]) < map.sizes[i];
        const std::byte* from = map.data;
        for (std::size_t i = 2; inside && i < 5; ++i)
          from += static_cast<std::uint64_t>(at[i]) * map.stride_bytes[i - 1];
        for (std::uint32_t i = 0; i < map.box_rows; ++i) {
          const std::int64_t row = std::int64_t{at[1]} + i;
          const bool there = inside && row >= 0 && static_cast<std::uint64_t>(row) < map.sizes[1];
          for (std::uint32_t chunk = 0; chunk < kRowBytes / 16; ++chunk) {
            std::uint32_t place = to + i * kRowBytes + chunk * 16;
            place ^= (place >> 7 & 7) << 4;
            std::byte* const there_to = shared_place(place, 16);
            if (there)
              std::memcpy(there_to,
                          from + static_cast<std::uint64_t>(row) * map.stride_bytes[0] +
                              (static_cast<std::uint64_t>(at[0]) * 2 + chunk * 16),
                          16);
            else
              std::memset(there_to, 0, 16);
          }
        }
      },
      barrier, bytes);
}

}  // namespace annulus::machine
