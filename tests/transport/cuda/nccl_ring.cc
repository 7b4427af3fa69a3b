// A program to be killed, stopped and broken by nccl_faults_test.py: ranks on GPUs pass a block round a ring over NCCL.
//
//   nccl_ring RANK SIZE PLACE STEPS STEP_MS TIMEOUT_MS [throw RANK STEP]
//
// It ends as the tool does: 0 when all went well, 3 with one line on stderr when a rank is lost.
#include <unistd.h>

#include <iostream>

#include "annulus/device_transports.h"
#include "annulus/rendezvous.h"
#include "transport/cuda/gpu_copy.h"
#include "transport/cuda/spin.h"

namespace annulus {
namespace {

struct Arguments {
  int rank, size;
  std::string place;
  int steps, step_ms, timeout_ms, throwing_rank = -1, throwing_step = -1;
};

// One write a line: the lines of several ranks must not mix.
void say(std::ostream& out, const std::string& line) { out << line + "\n" << std::flush; }

constexpr std::int64_t kRun = 1024, kRuns = 3000;  // every second run is sent

void run(Transport& transport, const Arguments& arguments) {
  const int rank = transport.rank(), size = transport.size();
  const cuda::Stream stream;
  const cuda::DeviceBuffer out(2 * kRun * kRuns), in(kRun * kRuns);
  Bytes got(kRun * kRuns);
  for (int step = 0; step < arguments.steps; ++step) {
    cuda::check(cudaMemsetAsync(out.data(), rank * 50 + step % 50, out.bytes(), stream.get()), "fill");
    const StridedBlock block{
        .data = out.data(), .axes = {{{1, 0}, {1, 0}, {1, 0}, {kRuns, 2 * kRun}}}, .run_bytes = kRun};
    transport.post({.plan = 1,
                    .step = step,
                    .sends = {{.peer = (rank + 1) % size, .blocks = {block}}},
                    .receives = {{.peer = (rank + size - 1) % size, .bytes = {in.data(), in.bytes()}}},
                    .stream = stream.get()});
    say(std::cout, "rank " + std::to_string(rank) + " step " + std::to_string(step));
    if (rank == arguments.throwing_rank && step == arguments.throwing_step)
      throw OutOfMemory("no memory for the tiles of step " + std::to_string(step));
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(arguments.step_ms);
    while (std::chrono::steady_clock::now() < end) {
      transport.poll();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    transport.wait();
    cuda::check(cudaMemsetAsync(out.data(), 255, out.bytes(), stream.get()), "overwrite");
    cuda::check(cudaMemcpyAsync(got.data(), in.data(), in.bytes(), cudaMemcpyDeviceToHost, stream.get()), "look");
    stream.wait();
    const auto right = static_cast<std::byte>((rank + size - 1) % size * 50 + step % 50);
    if (std::ranges::count(got, right) != std::ssize(got)) throw Error("wrong bytes at step " + std::to_string(step));
  }
  say(std::cout, "rank " + std::to_string(rank) + " done");
}

int run_rank(const Arguments& arguments) {
  const std::string name = "rank " + std::to_string(arguments.rank);
  const std::chrono::milliseconds timeout(arguments.timeout_ms);
  say(std::cout, name + " pid " + std::to_string(getpid()));
  try {
    int devices = 1;
    cuda::check(cudaGetDeviceCount(&devices), "count devices");
    const int device = arguments.rank % devices;
    cuda::check(cudaSetDevice(device), "choose a device");
    const auto transport = make_nccl_transport(
        make_rendezvous_transport(arguments.rank, arguments.size, arguments.place, {.timeout = timeout}), device,
        {.timeout = timeout});
    try {
      run(*transport, arguments);
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
  if (argc == 2) {  // nccl_ring gpu: is there one?
    return annulus::why_no_gpu() ? 1 : 0;
  }
  if (argc < 7) return 2;
  annulus::Arguments arguments{std::atoi(argv[1]), std::atoi(argv[2]), argv[3],
                               std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[6])};
  if (argc > 9) arguments.throwing_rank = std::atoi(argv[8]), arguments.throwing_step = std::atoi(argv[9]);
  return annulus::run_rank(arguments);
}
