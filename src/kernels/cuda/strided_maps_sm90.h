// Tensor maps of strided rows (StridedRows in produce_sm90.cuh), made on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/check.h"
#include "kernels/cuda/produce_sm90.cuh"

namespace annulus::cuda::sm90 {

class StridedMaps {
 public:
  struct Tensor {
    const void* data = nullptr;
    Strides stride;
    std::int64_t heads = 0;
  };

  StridedMaps(DType dtype, std::int64_t tokens, int head_dim, std::int64_t batch)
      : dtype_(dtype), tokens_(tokens), head_dim_(head_dim), batch_(batch) {}

  // Strides and addresses that the copy engine can follow: multiples of 16 bytes.
  bool can_address(const Tensor& tensor) const {
    constexpr std::int64_t kMost = (std::int64_t{1} << 40) / 2;
    const auto good = [](std::int64_t elements) { return elements > 0 && elements % 8 == 0 && elements < kMost; };
    return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && good(tensor.stride.token) &&
           good(tensor.stride.token * std::max<std::int64_t>(tokens_, 1)) &&
           (tensor.heads == 1 || good(tensor.stride.head)) && (batch_ == 1 || good(tensor.stride.batch));
  }

  StridedRows rows(const Tensor& tensor, int stride, int box_rows) const {
    StridedRows result{};
    result.stride = stride;
    result.longer_count = static_cast<int>(tokens_ % stride);
    const std::int64_t whole = tokens_ / stride;
    if (result.longer_count > 0) result.longer = map(tensor, 0, stride, whole + 1, result.longer_count, box_rows);
    if (whole > 0)
      result.shorter = map(tensor, result.longer_count, stride, whole, stride - result.longer_count, box_rows);
    return result;
  }

 private:
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

  // By way of the runtime, so that nothing links the driver's library.
  static Encode find_encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "find cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess)
      throw DeviceError(
          "the driver must know tensor maps; got no cuTensorMapEncodeTiled: install a driver for CUDA 12");
    return reinterpret_cast<Encode>(function);
  }

  CUtensorMap map(const Tensor& tensor, int first, int stride, std::int64_t rows, int residues, int box_rows) const {
    static const Encode encode = find_encoder();
    const auto bytes = [](std::int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
    const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(head_dim_), static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(residues), static_cast<cuuint64_t>(tensor.heads),
                                 static_cast<cuuint64_t>(batch_)};
    const cuuint64_t token = bytes(tensor.stride.token);
    // A dimension of one element goes nowhere; its stride only has to please the encoder.
    const cuuint64_t strides[4] = {static_cast<cuuint64_t>(stride) * token, token,
                                   tensor.heads > 1 ? bytes(tensor.stride.head) : token,
                                   batch_ > 1 ? bytes(tensor.stride.batch) : token};
    const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    const char* data = static_cast<const char*>(tensor.data) + static_cast<std::size_t>(first) * token;
    CUtensorMap result;
    const CUresult status =
        encode(&result, dtype_ == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
               const_cast<char*>(data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
      throw DeviceError("tensor maps must describe the rows of a branch; the driver refused one, error " +
                        std::to_string(static_cast<int>(status)) + ": choose the kernel `mma`");
    return result;
  }

  DType dtype_;
  std::int64_t tokens_;
  int head_dim_;
  std::int64_t batch_;
};

}  // namespace annulus::cuda::sm90
