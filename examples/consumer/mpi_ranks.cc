// One sequence over the processes of an MPI job: mpirun -n 3 mpi_ranks
#include <annulus/mpi.h>
#include <annulus/ranks.h>

#include <cmath>
#include <cstdio>

int main(int argc, char** argv) try {
  annulus::MpiProcess process(&argc, &argv);
  const auto transport = process.make_transport();

  const std::int64_t tokens = 100'003, heads = 4, head_dim = 64;
  const auto pattern = annulus::make_pattern(annulus::Preset::longnet, {2048, 65536}, {1, 16}, heads);
  const annulus::RankAttention attention({.tokens = tokens, .heads = heads, .head_dim = head_dim, .pattern = pattern},
                                         {.ranks = process.size()}, *transport);

  // This process has its own rows of everything, and no more.
  const auto rows = attention.rows();
  const auto size = static_cast<std::size_t>(rows * heads * head_dim);
  std::vector<float> q(size, 0.5f), k = q, v = q, out(size), lse(static_cast<std::size_t>(heads * rows));
  const std::array shape{std::int64_t{1}, rows, heads, head_dim};
  const auto view = [&](auto& x) { return annulus::TensorView(x.data(), annulus::DType::fp32, shape); };
  attention.forward({.q = view(q), .k = view(k), .v = view(v), .out = view(out), .lse = lse});

  const auto sent = static_cast<double>(attention.traffic(annulus::Pass::forward).sent_bytes);
  std::printf("rank %d of %d: %lld rows, sent %.1f MiB, mean %g\n", process.rank(), process.size(),
              static_cast<long long>(rows), sent / 1048576, rows > 0 ? out.back() : 0.5);
  return rows == 0 || std::abs(out.back() - 0.5f) < 1e-5f ? 0 : 1;
} catch (const annulus::TransportError& error) {
  std::fprintf(stderr, "%s\n", error.what());  // names the rank that is lost, on every other rank
  return 3;
}
