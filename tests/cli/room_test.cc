#include "cli/room.h"

#include <gtest/gtest.h>

#include "annulus/device_transports.h"
#include "annulus/rendezvous.h"
#include "cli/prediction.h"

namespace annulus::cli {
namespace {

TEST(Room, MoreThanAHostHasIsRefusedWithNumbers) {
  run_ranks(launch_threads(2), {}, [](Rank& rank) {
    check_room(rank, {.host_bytes = 1 << 20}, "a megabyte");
    return kRight;
  });
  testing::internal::CaptureStderr();
  EXPECT_THROW(run_ranks(launch_threads(2), {},
                         [](Rank& rank) {
                           check_room(rank, {.host_bytes = std::int64_t{1} << 59}, "an exabyte");
                           return kRight;
                         }),
               Reported);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("1.0 EiB"), std::string::npos) << text;
  EXPECT_NE(text.find("available"), std::string::npos) << text;
  EXPECT_EQ(text.find("an exabyte"), text.rfind("an exabyte")) << "said once";
}

TEST(Staging, IsThatOfTheTransport) {
  const auto staging = [](const char* transport, int ranks, bool on_gpu, const char* rendezvous = "") {
    Launch launch;
    launch.transport = transport;
    launch.rendezvous = rendezvous;
    launch.ranks = ranks;
    return staging_of(launch, on_gpu);
  };
  EXPECT_EQ(staging("threads", 4, true).host_bytes, 0);
  EXPECT_EQ(staging("threads", 4, true).gpu_bytes, 0);
  const Staging on_cpu = staging("mpi", 4, false), staged = staging("mpi", 4, true);
  EXPECT_EQ(staged.host_bytes - on_cpu.host_bytes, staged_staging_bytes(4));
  EXPECT_GT(staged_staging_bytes(4), 0);
  EXPECT_EQ(staged.gpu_bytes, 0);
  EXPECT_EQ(staging("nccl", 4, true).host_bytes, on_cpu.host_bytes);
  EXPECT_EQ(staging("nccl", 4, true).gpu_bytes, nccl_staging_bytes(4));
  EXPECT_GT(nccl_staging_bytes(4), 0);
  EXPECT_EQ(staging("tcp", 4, false, "file:x").host_bytes, tcp_staging_bytes(4));
  EXPECT_EQ(staging("tcp", 4, true, "file:x").host_bytes, tcp_staging_bytes(4) + staged_staging_bytes(4));
  EXPECT_EQ(staging("nccl", 4, true, "file:x").host_bytes, tcp_staging_bytes(4)) << "no MPI, no messages of it";
  for (const char* transport : {"mpi", "tcp", "nccl"}) {  // a lone rank moves nothing
    EXPECT_EQ(staging(transport, 1, true).host_bytes, 0);
    EXPECT_EQ(staging(transport, 1, true).gpu_bytes, 0);
  }
}

}  // namespace
}  // namespace annulus::cli
