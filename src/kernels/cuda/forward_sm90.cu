// The Hopper kernel's host side: tensor maps and the launch.
#include "kernels/cuda/attend_sm90.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/forward_kernels.h"

namespace annulus::cuda::sm90 {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// By way of the runtime, so that nothing links the driver's library.
EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "find cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess)
    throw DeviceError("the driver must know tensor maps; got no cuTensorMapEncodeTiled: install a driver for CUDA 12");
  return reinterpret_cast<EncodeTiled>(function);
}

struct Tensor {
  const void* data = nullptr;
  Strides stride;
  std::int64_t heads = 0;
};

class MapMaker {
 public:
  MapMaker(const Launch& launch, const LaunchShape& shape) : launch_(launch), shape_(shape) {}

  StridedRows rows(const Tensor& tensor, int stride, int box_rows) const {
    StridedRows result{};
    result.stride = stride;
    result.longer_count = static_cast<int>(launch_.tokens % stride);
    const std::int64_t whole = launch_.tokens / stride;
    if (result.longer_count > 0) result.longer = map(tensor, 0, stride, whole + 1, result.longer_count, box_rows);
    if (whole > 0)
      result.shorter = map(tensor, result.longer_count, stride, whole, stride - result.longer_count, box_rows);
    return result;
  }

 private:
  CUtensorMap map(const Tensor& tensor, int first, int stride, std::int64_t rows, int residues, int box_rows) const {
    static const EncodeTiled encode = find_encoder();
    const auto bytes = [](std::int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
    const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(launch_.head_dim), static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(residues), static_cast<cuuint64_t>(tensor.heads),
                                 static_cast<cuuint64_t>(shape_.batch)};
    const cuuint64_t token = bytes(tensor.stride.token);
    // A dimension of one element goes nowhere; its stride only has to please the encoder.
    const cuuint64_t strides[4] = {static_cast<cuuint64_t>(stride) * token, token,
                                   tensor.heads > 1 ? bytes(tensor.stride.head) : token,
                                   shape_.batch > 1 ? bytes(tensor.stride.batch) : token};
    const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    const char* data = static_cast<const char*>(tensor.data) + static_cast<std::size_t>(first) * token;
    CUtensorMap result;
    const CUresult status = encode(
        &result, shape_.dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
        const_cast<char*>(data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
      throw DeviceError("tensor maps must describe the rows of a branch; the driver refused one, error " +
                        std::to_string(static_cast<int>(status)) + ": choose the kernel `mma`");
    return result;
  }

  const Launch& launch_;
  const LaunchShape& shape_;
};

constexpr int config_index(std::int64_t head_dim, bool causal) {
  for (int i = 0; i < static_cast<int>(std::size(kSm90Configs)); ++i)
    if (kSm90Configs[i].head_dim == head_dim && kSm90Configs[i].causal == causal) return i;
  return -1;
}

// Calls f.operator()<kConfig, T, kCounts>() for the kernel of a problem.
template <class T, class F>
void with_config(int config, bool counts, F f) {
  const auto call = [&]<int kConfig>() {
    counts ? f.template operator()<kConfig, T, true>() : f.template operator()<kConfig, T, false>();
  };
  switch (config) {
    case 0:
      return call.template operator()<0>();
    case 1:
      return call.template operator()<1>();
    case 2:
      return call.template operator()<2>();
    default:
      return call.template operator()<3>();
  }
}
static_assert(std::size(kSm90Configs) == 4);
template <class F>
void with_kernel(DType dtype, std::int64_t head_dim, bool causal, bool counts, F f) {
  const int config = config_index(head_dim, causal);
  if (dtype == DType::fp16) return with_config<__half>(config, counts, f);
  with_config<__nv_bfloat16>(config, counts, f);
}

Params make_params(const Launch& launch, const LaunchShape& shape, int key_rows) {
  Params params{};
  params.common = launch;
  const MapMaker maker(launch, shape);
  for (int i = 0; i < shape.sweeps; ++i)
    params.query[i] = maker.rows({launch.q, launch.q_stride, launch.heads}, launch.tiling.sweeps[i].stride, 64);
  for (int i = 0; i < launch.tiling.branch_count; ++i) {
    const int dilation = launch.tiling.branches[i].dilation;
    params.key[i] = maker.rows({launch.k, launch.k_stride, shape.kv_heads}, dilation, key_rows);
    params.value[i] = maker.rows({launch.v, launch.v_stride, shape.kv_heads}, dilation, key_rows);
  }
  return params;
}

}  // namespace

bool takes(const Problem& problem, const DeviceInfo& device) {
  return device.compute_capability == 90 && problem.dtype != DType::fp32 &&
         config_index(problem.head_dim, problem.causal) >= 0 && *problem.scale > 0 && can_schedule(problem);
}

TileShape tile_shape(const Problem& problem) {
  const Sm90Config& config = kSm90Configs[config_index(problem.head_dim, problem.causal)];
  return {config.query_rows(), config.key_rows};
}

int arrivals(const Problem& problem) { return kSm90Configs[config_index(problem.head_dim, problem.causal)].groups; }

bool can_address(const Launch& launch, const LaunchShape& shape) {
  constexpr std::int64_t kUnit = 8;  // elements: 16 bytes
  constexpr std::int64_t kMost = (std::int64_t{1} << 40) / 2;
  const auto fits = [&](const void* data, const Strides& stride, std::int64_t heads) {
    const auto good = [&](std::int64_t elements) { return elements > 0 && elements % kUnit == 0 && elements < kMost; };
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && good(stride.token) &&
           good(stride.token * std::max<std::int64_t>(launch.tokens, 1)) && (heads == 1 || good(stride.head)) &&
           (shape.batch == 1 || good(stride.batch));
  };
  return fits(launch.q, launch.q_stride, launch.heads) && fits(launch.k, launch.k_stride, shape.kv_heads) &&
         fits(launch.v, launch.v_stride, shape.kv_heads) && fits(launch.out, launch.out_stride, launch.heads);
}

int prepare(const Problem& problem) {
  for (const bool counts : {false, true})
    with_kernel(problem.dtype, problem.head_dim, problem.causal, counts, [&]<int kConfig, class T, bool kCounts>() {
      check(cudaFuncSetAttribute(forward<kConfig, T, kCounts>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSm90Configs[kConfig].shared_bytes()),
            "raise the shared memory of the kernel `sm90`");
    });
  return 1;
}

void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream) {
  with_kernel(shape.dtype, launch.head_dim, launch.tiling.causal, launch.tiling.folds,
              [&]<int kConfig, class T, bool kCounts>() {
                constexpr Sm90Config kC = kSm90Configs[kConfig];
                cudaLaunchConfig_t config{};
                config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(shape.blocks, launch.tile_count));
                config.blockDim = kC.threads();
                config.dynamicSmemBytes = kC.shared_bytes();
                config.stream = stream;
                check(
                    cudaLaunchKernelEx(&config, forward<kConfig, T, kCounts>, make_params(launch, shape, kC.key_rows)),
                    "start the kernel `sm90`");
              });
}

}  // namespace annulus::cuda::sm90
