// The reference's inner loops: products of a vector with rows of a matrix, and sums of such rows.
//
// Every sum has one order, and no multiplication is fused with an addition: the bits are the same on every instruction
// set, and those that one row at a time would give.
#pragma once

#include <cstddef>
#include <cstdint>

namespace annulus::reference {

// Rows of a dense matrix with `columns` columns, any of them in any order.
template <class Real>
struct ListedRows {
  const Real* matrix;
  std::size_t columns;
  const std::int64_t* rows;  // [count]
  std::size_t count;
};

// out[i] = x . row i. A sum has 64 / sizeof(Real) lanes, which come together in order at the end.
void dot_rows(const double* x, const ListedRows<double>& list, double* out);
void dot_rows(const float* x, const ListedRows<float>& list, float* out);

// y += sum of a[i] * row i, in the order of i.
void add_rows(const double* a, const ListedRows<double>& list, double* y);
void add_rows(const float* a, const ListedRows<float>& list, float* y);

}  // namespace annulus::reference
