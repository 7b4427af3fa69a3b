// Ranks that are threads, with memory on GPUs: the conformance suite, and what only GPUs can get wrong.
#include "annulus/device_transports.h"
#include "annulus/thread_group.h"
#include "transport/cuda/on_gpu.h"
#include "transport/cuda/spin.h"

namespace annulus {
namespace {

// Ranks are dealt out over the GPUs there are.
std::vector<int> devices_for(int size) {
  int count = 1;
  cudaGetDeviceCount(&count);
  std::vector<int> devices;
  for (int rank = 0; rank < size; ++rank) devices.push_back(rank % std::max(count, 1));
  return devices;
}

RanksParam gpu_threads(int size) {
  return {std::to_string(size), [size] {
            return std::make_unique<GpuThreadRanks>(size, [size](const TransportOptions& options) {
              return make_device_thread_group(size, std::vector<int>(static_cast<std::size_t>(size), 0), options);
            });
          }};
}

RanksParam staged_threads(int size, std::int64_t piece_bytes) {
  return {"staged_" + std::to_string(size), [=] {
            return std::make_unique<GpuThreadRanks>(size, [=](const TransportOptions& options) {
              auto ranks = make_thread_group(size, options);
              for (auto& rank : ranks) rank = make_staged_transport(std::move(rank), 0, {.piece_bytes = piece_bytes});
              return ranks;
            });
          }};
}

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(GpuThreads, Conformance,
                         ::testing::Values(gpu_threads(1), gpu_threads(2), gpu_threads(3), gpu_threads(8),
                                           staged_threads(2, 4 << 20), staged_threads(3, 70'001)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(GpuThreads, ConformanceFaults,
                         ::testing::Values(gpu_threads(2), gpu_threads(4), staged_threads(3, 4 << 20)), name_of);

void on_threads(std::vector<std::unique_ptr<Transport>> ranks, const std::vector<int>& devices,
                const std::function<void(Transport&)>& body) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    threads.emplace_back([&, rank, own = std::move(ranks[rank])] {
      try {
        cuda::check(cudaSetDevice(devices[rank]), "choose a device");
        body(*own);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

Exchange ring(const Transport& transport, std::int64_t step, const std::byte* out, std::span<std::byte> in,
              void* stream) {
  const int rank = transport.rank(), size = transport.size();
  return {.plan = 1,
          .step = step,
          .sends = {{.peer = (rank + 1) % size,
                     .blocks = {{.data = out, .run_bytes = static_cast<std::int64_t>(in.size())}}}},
          .receives = {{.peer = (rank + size - 1) % size, .bytes = in}},
          .stream = stream};
}

// What is sent is written by slow work queued before post(), read by the peer, and overwritten by work queued after
// wait(); the host never waits for a GPU in between. 1000 exchanges, and memory is where it was.
TEST(DeviceThreads, EventsKeepTheOrder) {
  for (const int size : {1, 2, 4, 8}) {
    const std::vector<int> devices = devices_for(size);
    const int steps = size == 4 ? 1000 : 60;
    constexpr std::size_t kBytes = 100'000;
    std::atomic<std::int64_t> lost_bytes{0};
    on_threads(make_device_thread_group(size, devices), devices, [&](Transport& transport) {
      const int rank = transport.rank(), previous = (rank + size - 1) % size;
      const cuda::Stream stream;
      const cuda::DeviceBuffer out(kBytes), in(kBytes), kept(kBytes * static_cast<std::size_t>(steps));
      const auto value = [](int of, int step) { return static_cast<std::uint8_t>(of * 37 + step * 11 + 1); };
      std::size_t free_before = 0, free_after = 0, total = 0;
      for (int step = 0; step < steps; ++step) {
        spin(stream.get(), (step * 7 + rank * 3) % 5 * 20);
        cuda::check(cudaMemsetAsync(out.data(), value(rank, step), kBytes, stream.get()), "fill");
        transport.post(ring(transport, step, out.data(), {in.data(), kBytes}, stream.get()));
        if (step % 3 == 0) spin(stream.get(), 30);
        transport.wait();
        cuda::check(cudaMemsetAsync(out.data(), 0xee, kBytes, stream.get()), "overwrite");
        cuda::check(cudaMemcpyAsync(kept.data() + static_cast<std::size_t>(step) * kBytes, in.data(), kBytes,
                                    cudaMemcpyDeviceToDevice, stream.get()),
                    "keep");
        cuda::check(cudaMemsetAsync(in.data(), 0xdd, kBytes, stream.get()), "free");
        if (step == 50) cudaMemGetInfo(&free_before, &total);
      }
      stream.wait();
      cudaMemGetInfo(&free_after, &total);
      if (rank == 0) lost_bytes = static_cast<std::int64_t>(free_before) - static_cast<std::int64_t>(free_after);
      Bytes got(kept.bytes());
      cuda::check(cudaMemcpy(got.data(), kept.data(), kept.bytes(), cudaMemcpyDeviceToHost), "look");
      int wrong = 0;
      for (int step = 0; step < steps; ++step)
        for (std::size_t i = 0; i < kBytes; ++i)
          wrong += got[static_cast<std::size_t>(step) * kBytes + i] != static_cast<std::byte>(value(previous, step));
      EXPECT_EQ(wrong, 0) << "rank " << rank << " of " << size;
    });
    EXPECT_LT(lost_bytes, std::int64_t{32} << 20) << "leaks";
  }
}

// The host runs ahead: neither post() nor wait() waits for the GPU.
TEST(DeviceThreads, ThreadsDoNotWaitForTheGpu) {
  const std::vector<int> devices = devices_for(2);
  on_threads(make_device_thread_group(2, devices), devices, [&](Transport& transport) {
    const cuda::Stream stream;
    const cuda::DeviceBuffer out(1 << 20), in(1 << 20);
    spin(stream.get(), 1);  // loads the kernel
    transport.post(ring(transport, 0, out.data(), {in.data(), in.bytes()}, stream.get()));
    transport.wait();
    stream.wait();
    transport.all_gather("");
    spin(stream.get(), 300'000);
    const auto start = std::chrono::steady_clock::now();
    for (int step = 1; step < 4; ++step) {
      transport.post(ring(transport, step, out.data(), {in.data(), in.bytes()}, stream.get()));
      transport.wait();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 200ms);
    stream.wait();
  });
}

// The host has run ahead of the GPU when a rank gives up: what earlier exchanges queued counts too.
TEST(DeviceThreads, EarlierExchangesAreOverAfterAbort) {
  const std::vector<int> devices = devices_for(3);
  on_threads(make_device_thread_group(3, devices), devices, [&](Transport& transport) {
    constexpr std::size_t kBytes = 8 << 20;
    const cuda::Stream stream;
    const cuda::DeviceBuffer out(kBytes), in(kBytes);
    spin(stream.get(), 50'000);
    const int rank = transport.rank(), other = 1 - rank;
    Exchange pair{.step = 1, .stream = stream.get()};  // ranks 0 and 1 swap, behind slow work
    if (rank < 2) {
      pair.sends = {{.peer = other, .blocks = {{.data = out.data(), .run_bytes = kBytes}}}};
      pair.receives = {{.peer = other, .bytes = {in.data(), kBytes}}};
    }
    transport.post(pair);
    transport.wait();
    try {
      transport.all_gather("");  // all hosts are through, the copies are not; who is last may hear of the end in here
      transport.post({.step = 2, .stream = stream.get()});
      if (rank == 0) transport.abort("enough");
      transport.all_gather("");
      ADD_FAILURE() << "rank " << rank << " heard of nothing";
    } catch (const TransportError&) {
    }
    const cuda::Stream beside;
    cuda::check(cudaMemsetAsync(in.data(), 4, kBytes, beside.get()), "refill");
    beside.wait();
    stream.wait();
    std::this_thread::sleep_for(60ms);
    Bytes got(kBytes);
    cuda::check(cudaMemcpy(got.data(), in.data(), kBytes, cudaMemcpyDeviceToHost), "look");
    EXPECT_EQ(std::ranges::count(got, std::byte{4}), static_cast<std::ptrdiff_t>(kBytes));
  });
}

// A rank that gives up may free or refill its memory at once, though the copies of it were queued behind slow work.
TEST(DeviceThreads, MemoryIsLeftAloneAfterAbort) {
  for (int round = 0; round < 6; ++round) {
    const std::vector<int> devices = devices_for(2);
    on_threads(make_device_thread_group(2, devices), devices, [&](Transport& transport) {
      constexpr std::size_t kBytes = 8 << 20;
      const cuda::Stream stream;
      const cuda::DeviceBuffer out(kBytes), in(kBytes);
      cuda::check(cudaMemset(out.data(), 1, kBytes), "fill");
      cuda::check(cudaDeviceSynchronize(), "fill");
      spin(stream.get(), 20'000);
      try {
        transport.post(ring(transport, 5, out.data(), {in.data(), kBytes}, stream.get()));
        for (int i = 0; i < round * 3; ++i) transport.poll();
        if (transport.rank() == 0) transport.abort("enough");
        transport.wait();
        if (transport.rank() == 1) transport.all_gather("rank 0 has given up by now");
        ADD_FAILURE() << "rank " << transport.rank() << " heard of nothing";
      } catch (const TransportError& error) {
        EXPECT_NE(std::string(error.what()).find("rank 0 gave up at step 5: enough"), std::string::npos)
            << error.what();
      }
      const cuda::Stream other;  // which does not wait for the first
      cuda::check(cudaMemsetAsync(in.data(), 4, kBytes, other.get()), "refill");
      other.wait();
      stream.wait();
      std::this_thread::sleep_for(30ms);
      Bytes got(kBytes);
      cuda::check(cudaMemcpy(got.data(), in.data(), kBytes, cudaMemcpyDeviceToHost), "look");
      EXPECT_EQ(std::ranges::count(got, std::byte{4}), static_cast<std::ptrdiff_t>(kBytes));
    });
  }
}

TEST(DeviceThreads, OneHasGpuMemoryAndTheOtherHasNot) {
  const std::vector<int> devices = devices_for(2);
  on_threads(make_device_thread_group(2, devices), devices, [&](Transport& transport) {
    const cuda::Stream stream;
    const cuda::DeviceBuffer memory(2000);
    Bytes host(2000);
    std::byte* const data = transport.rank() == 0 ? memory.data() : host.data();
    support::expect_refused_as<TransportError>(
        [&] {
          transport.post(ring(transport, 7, data, {data + 1000, 1000}, transport.rank() == 0 ? stream.get() : nullptr));
          transport.wait();
          transport.all_gather("");
        },
        {"disagree at step 7", "one has it on a GPU, the other on the host"});
  });
}

TEST(DeviceThreads, RefusesWhatItCannotMove) {
  support::expect_refused([] { make_device_thread_group(2, {0}); }, {"every rank", "1 devices for 2 ranks"});
  support::expect_refused([] { make_device_thread_group(0, {}); }, {"1 rank or more", "got 0"});
  const auto host_ranks = make_thread_group(1);
  const cuda::Stream stream;
  support::expect_refused([&] { host_ranks[0]->post({.step = 3, .stream = stream.get()}); },
                          {"memory of the host", "step 3", "device_transports.h"});
}

}  // namespace
}  // namespace annulus
