// A program to be killed, stopped and broken by mpi_faults_test.py: ranks pass a block round a ring, step after step.
//
//   mpi_ring STEPS STEP_MS TIMEOUT_MS [throw RANK STEP]
//
// With ANNULUS_MPI_CUDA=1 the block lies on a GPU that is not one (support/pretend_gpu.h), so any MPI takes it.
//
// It ends as the tool does: 0 when all went well, 3 with one line on stderr when a rank is lost.
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "annulus/mpi.h"
#include "support/pretend_gpu.h"
#include "transport/staged.h"

namespace annulus {
namespace {

std::atomic<bool> stop{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

struct Arguments {
  std::int64_t steps, step_ms, timeout_ms, throwing_rank = -1, throwing_step = -1;
};

void compute(Transport& transport, std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    transport.poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// One write a line: the lines of several ranks must not mix.
void say(std::ostream& out, const std::string& line) { out << line + "\n" << std::flush; }

struct Blocks {
  std::vector<std::byte> out = std::vector<std::byte>(3'000'000), in = out;
};

void run(Transport& transport, const Arguments& arguments, Blocks& blocks, void* stream) {
  const int rank = transport.rank(), size = transport.size();
  transport.all_gather("the same problem");
  auto& [out, in] = blocks;
  for (std::int64_t step = 0; step < arguments.steps; ++step) {
    transport.post({.plan = 1,
                    .step = step,
                    .sends = {{.peer = (rank + 1) % size,
                               .blocks = {{.data = out.data(), .run_bytes = static_cast<std::int64_t>(out.size())}}}},
                    .receives = {{.peer = (rank + size - 1) % size, .bytes = in}},
                    .stream = stream});
    say(std::cout, "rank " + std::to_string(rank) + " step " + std::to_string(step));
    if (rank == arguments.throwing_rank && step == arguments.throwing_step)
      throw OutOfMemory("no memory for the tiles of step " + std::to_string(step));
    compute(transport, std::chrono::milliseconds(arguments.step_ms));
    transport.wait();
  }
  say(std::cout, "rank " + std::to_string(rank) + " done");
}

int run_rank(MpiProcess& process, const Arguments& arguments) {
  const std::string name = "rank " + std::to_string(process.rank());
  const auto warn = [&](const std::string& text) { say(std::cerr, name + " warns: " + text); };
  try {
    support::PretendStream stream;
    Blocks blocks;  // until abort() has returned a GPU may be at them
    auto transport = process.make_transport(
        {.timeout = std::chrono::milliseconds(arguments.timeout_ms), .warn = warn, .stop = &stop});
    const bool on_gpu = process.cuda_aware();
    if (on_gpu)
      transport = make_staged_transport(std::move(transport), std::make_unique<support::PretendCopies>(2), {});
    say(std::cout, name + " by " + std::string(transport->name()) + " pid " + std::to_string(getpid()));
    try {
      run(*transport, arguments, blocks, on_gpu ? &stream : nullptr);
    } catch (const std::exception& error) {
      transport->abort(error.what());
      throw;
    }
    return 0;
  } catch (const std::exception& error) {
    say(std::cerr, name + " fails: " + error.what());
    return 3;
  }
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  annulus::MpiProcess process(&argc, &argv);
  std::signal(SIGTERM, [](int) { annulus::stop = true; });
  if (argc < 4) return 2;
  annulus::Arguments arguments{std::atoll(argv[1]), std::atoll(argv[2]), std::atoll(argv[3])};
  if (argc > 6) arguments.throwing_rank = std::atoll(argv[5]), arguments.throwing_step = std::atoll(argv[6]);
  return annulus::run_rank(process, arguments);
}
