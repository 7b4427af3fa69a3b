// Gathering of strided blocks on the GPU equals packing on the CPU, and is about as fast as memory.
#include "kernels/cuda/copies.h"

#include <gtest/gtest.h>

#include "transport/cuda/gpu_copy.h"

namespace annulus {
namespace {

Bytes gathered(DeviceCopies& copies, const std::vector<StridedBlock>& host_blocks, std::size_t shift) {
  const auto bytes = static_cast<std::size_t>(total_bytes(host_blocks));
  const cuda::DeviceBuffer packed(bytes + shift + 64);
  cuda::check(cudaMemset(packed.data(), 0x5a, packed.bytes()), "poison");
  const GpuCopy gpu({.sends = {{.peer = 0, .blocks = host_blocks}}}, nullptr);
  cuda::check(cudaDeviceSynchronize(), "upload");
  copies.gather(gpu.exchange.sends[0].blocks, copies.device(), packed.data() + shift, 0);
  copies.settle();
  Bytes all(packed.bytes());
  cuda::check(cudaMemcpy(all.data(), packed.data(), all.size(), cudaMemcpyDeviceToHost), "look");
  for (std::size_t i = 0; i < shift; ++i) EXPECT_EQ(all[i], std::byte{0x5a});
  for (std::size_t i = shift + bytes; i < all.size(); ++i) EXPECT_EQ(all[i], std::byte{0x5a});
  return {all.begin() + static_cast<std::ptrdiff_t>(shift), all.begin() + static_cast<std::ptrdiff_t>(shift + bytes)};
}

TEST(DeviceCopies, GatherIsPacking) {
  const auto copies = cuda::make_copies(0, 1);
  for (std::uint64_t key = 0; key < 150; ++key) {
    const std::int64_t bytes = key % 10 == 0 ? 3'000'000 : static_cast<std::int64_t>(key * key * 17 % 50'000);
    const ScatteredMessage message(key, bytes);
    EXPECT_EQ(first_wrong(gathered(*copies, message.blocks(), key % 3 == 0 ? 0 : key % 16), key), -1) << "key " << key;
  }
}

// More blocks than a launch has parameters for, aligned and not.
TEST(DeviceCopies, LongLists) {
  const auto copies = cuda::make_copies(0, 1);
  Bytes memory(1 << 20);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = payload_byte(5, i);
  const cuda::DeviceBuffer on_gpu(memory.size());
  cuda::copy_to_device(on_gpu.data(), memory.data(), memory.size(), "upload");
  std::mt19937 random(1);
  std::vector<StridedBlock> host, device;
  for (int i = 0; i < 5000; ++i) {
    const auto run = std::int64_t{1} << random() % 8, rows = static_cast<std::int64_t>(1 + random() % 6);
    const std::size_t at = random() % (memory.size() / 2);
    host.push_back(
        {.data = memory.data() + at, .axes = {{{1, 0}, {1, 0}, {2, 50'000}, {rows, 1000}}}, .run_bytes = run});
    device.push_back(host.back());
    device.back().data = on_gpu.data() + at;
  }
  Bytes expected(static_cast<std::size_t>(total_bytes(host))), got(expected.size());
  PackCursor(host).pack(expected);
  const cuda::DeviceBuffer packed(expected.size());
  copies->gather(device, 0, packed.data(), 0);
  copies->settle();
  cuda::check(cudaMemcpy(got.data(), packed.data(), got.size(), cudaMemcpyDeviceToHost), "look");
  EXPECT_EQ(got, expected);
  const auto pinned = copies->host_memory(static_cast<std::int64_t>(expected.size()));
  copies->gather(device, 0, pinned->bytes().data(), 0);
  copies->settle();
  EXPECT_TRUE(std::ranges::equal(pinned->bytes(), expected));
}

// A block whose offsets pass 2^32, cut into several.
TEST(DeviceCopies, BlocksBeyondFourGibibytes) {
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  if (free < std::size_t{16} << 30) GTEST_SKIP() << "needs 16 GiB of GPU memory, " << (free >> 30) << " are free";
  const auto copies = cuda::make_copies(0, 1);
  constexpr std::int64_t kRun = 3 << 20, kRuns = 1500;  // 4.4 GiB of every second run
  const cuda::DeviceBuffer memory(2 * kRun * kRuns), packed(kRun * kRuns);
  for (std::int64_t i = 0; i < kRuns; ++i)
    cuda::check(cudaMemset(memory.data() + 2 * i * kRun, static_cast<int>(i % 251), kRun), "fill");
  cuda::check(cudaDeviceSynchronize(), "fill");
  const StridedBlock block{
      .data = memory.data(), .axes = {{{1, 0}, {1, 0}, {1, 0}, {kRuns, 2 * kRun}}}, .run_bytes = kRun};
  copies->gather({&block, 1}, 0, packed.data(), 0);
  copies->settle();
  for (std::int64_t i = 0; i < kRuns; i += 77) {
    Bytes run(kRun);
    cuda::check(cudaMemcpy(run.data(), packed.data() + i * kRun, kRun, cudaMemcpyDeviceToHost), "look");
    EXPECT_EQ(std::ranges::count(run, static_cast<std::byte>(i % 251)), kRun) << "run " << i;
  }
}

// Prints what it measures: bytes read and written a second, of rows of several sizes, every second row.
TEST(DeviceCopies, Speed) {
  const auto copies = cuda::make_copies(0, 1);
  constexpr std::int64_t kBytes = std::int64_t{512} << 20;
  const cuda::DeviceBuffer memory(2 * kBytes), packed(kBytes);
  cuda::check(cudaMemset(memory.data(), 7, memory.bytes()), "fill");
  cuda::check(cudaDeviceSynchronize(), "fill");
  for (const std::int64_t run : {16, 64, 128, 256, 1024, 4096, 1 << 20}) {
    const StridedBlock block{
        .data = memory.data(), .axes = {{{1, 0}, {1, 0}, {1, 0}, {kBytes / run, 2 * run}}}, .run_bytes = run};
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      cuda::Event begin, end;
      begin.record(static_cast<cudaStream_t>(copies->lane(0)));
      copies->gather({&block, 1}, 0, packed.data(), 0);
      end.record(static_cast<cudaStream_t>(copies->lane(0)));
      best = std::min(best, end.ms_since(begin));
    }
    std::printf("rows of %7lld bytes: %6.0f GB/s read and written\n", static_cast<long long>(run),
                2e-6 * static_cast<double>(kBytes) / best);
  }
}

}  // namespace
}  // namespace annulus
