// Sums of rows against loops as plain as the header: the same bits, for every width and every number of rows.
#include "reference/row_sums.h"

#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace annulus::reference {
namespace {

template <class Real>
Real plain_dot(const Real* a, const Real* b, std::size_t size) {
  std::vector<Real> lanes(64 / sizeof(Real));
  const std::size_t whole = size / lanes.size() * lanes.size();
  Real sum = 0;
  for (std::size_t i = 0; i < whole; ++i) lanes[i % lanes.size()] += a[i] * b[i];
  for (std::size_t i = whole; i < size; ++i) sum += a[i] * b[i];
  for (const Real lane : lanes) sum += lane;
  return sum;
}

template <class Real>
class RowSums : public testing::Test {
 protected:
  std::vector<Real> draw(std::size_t size) {
    std::vector<Real> values(size);
    for (Real& x : values) x = static_cast<Real>(normal_(generator_));
    return values;
  }

  static void expect_same_bits(const std::vector<Real>& got, const std::vector<Real>& want, std::size_t columns) {
    if (want.empty()) return;  // memcmp takes no null pointer, not even of nothing
    ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(Real)), 0)
        << columns << " columns, " << want.size() << " results";
  }

 private:
  std::mt19937 generator_{1};
  std::normal_distribution<double> normal_;
};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(RowSums, Reals);

TYPED_TEST(RowSums, HaveTheBitsOfPlainLoops) {
  constexpr std::size_t kRows = 11;
  std::vector<std::size_t> widths = {80, 128, 256, 301};
  for (std::size_t columns = 1; columns < 70; ++columns) widths.push_back(columns);
  for (const std::size_t columns : widths) {
    const std::vector<TypeParam> matrix = this->draw(kRows * columns);
    const std::vector<TypeParam> x = this->draw(columns);
    for (std::size_t count = 0; count <= 10; ++count) {
      std::vector<std::int64_t> rows;
      for (std::size_t i = 0; i < count; ++i) rows.push_back(static_cast<std::int64_t>(i * i * 7 % kRows));
      const ListedRows<TypeParam> list{matrix.data(), columns, rows.data(), count};
      const auto row = [&](std::size_t i) { return matrix.data() + static_cast<std::size_t>(rows[i]) * columns; };

      std::vector<TypeParam> dots(count), plain_dots(count);
      dot_rows(x.data(), list, dots.data());
      for (std::size_t i = 0; i < count; ++i) plain_dots[i] = plain_dot(x.data(), row(i), columns);
      this->expect_same_bits(dots, plain_dots, columns);

      const std::vector<TypeParam> factors = this->draw(count);
      std::vector<TypeParam> sum = x, plain_sum = x;
      add_rows(factors.data(), list, sum.data());
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t c = 0; c < columns; ++c) plain_sum[c] += factors[i] * row(i)[c];
      this->expect_same_bits(sum, plain_sum, columns);
    }
  }
}

}  // namespace
}  // namespace annulus::reference
