// Rows of one head for tests of single tiles: strided in memory, with gaps, and as numbers.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cpu/tiles.h"
#include "numeric/half.h"
#include "support/host_tensor.h"

namespace annulus::support {

struct Matrix {
  Matrix(DType dtype, std::int64_t rows, std::int64_t head_dim, std::mt19937_64& random)
      : memory(dtype, {1, rows, 1, head_dim}, Layout::apart) {
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < rows * head_dim; ++i) values.push_back(round_to(dtype, normal(random)));
    memory.fill(values);
  }

  std::int64_t rows() const { return memory.view().shape[1]; }
  std::int64_t head_dim() const { return memory.view().shape[3]; }
  double operator()(std::int64_t row, std::int64_t d) const {
    return values[static_cast<std::size_t>(row * head_dim() + d)];
  }
  cpu::SourceRows source() const {
    const ConstTensorView view = memory.view();
    return {view.data, view.dtype, view.stride[1], view.shape[1], view.shape[3]};
  }

  HostTensor memory;
  std::vector<double> values;
};

// scale times row i of a . row j of b
inline double dot(const Matrix& a, const Matrix& b, std::int64_t i, std::int64_t j, double scale = 1) {
  double sum = 0;
  for (std::int64_t d = 0; d < a.head_dim(); ++d) sum += a(i, d) * b(j, d);
  return scale * sum;
}

}  // namespace annulus::support
