#include <annulus/attention.h>

#include <cmath>
#include <cstdio>

int main() {
  const std::int64_t tokens = 100'003, heads = 4, head_dim = 64;  // nothing needs to divide anything
  const auto pattern = annulus::make_pattern(annulus::Preset::longnet, {2048, 16384}, {1, 4}, heads);
  const annulus::Attention attention({.tokens = tokens, .heads = heads, .head_dim = head_dim, .pattern = pattern});

  std::vector<float> q(tokens * heads * head_dim, 0.5f), k = q, v = q, out(q.size()), lse(heads * tokens);
  const std::array shape{std::int64_t{1}, tokens, heads, head_dim};
  const auto view = [&](auto& x) { return annulus::TensorView(x.data(), annulus::DType::fp32, shape); };
  attention.forward({.q = view(q), .k = view(k), .v = view(v), .out = view(out), .lse = lse});

  std::printf("%s\nthe values are all 0.5, so is their mean: %g\n", attention.explain().c_str(), out.back());
  return std::abs(out.back() - 0.5f) < 1e-5f ? 0 : 1;
}
