// The pool's promises: every index once, in order of start, in a slot of its own; exceptions come back; nobody waits
// for a helper.
#include "kernels/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

#include <gtest/gtest.h>

namespace annulus {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Waits for what must come. False after a time that no healthy run needs: the test then fails instead of hanging.
template <class Condition>
bool wait_for(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(ThreadPool, RunsEveryIndexOnce) {
  ThreadPool pool;
  for (const std::int64_t count : {0, 1, 2, 7, 1000})
    for (const int width : {1, 2, 3, 16, 64}) {
      std::vector<std::atomic<int>> calls(index(count));
      pool.run(count, width, [&](std::int64_t i, int) { ++calls[index(i)]; });
      for (const std::atomic<int>& n : calls) EXPECT_EQ(n, 1) << count << " tasks, width " << width;
    }
}

TEST(ThreadPool, NothingToDoCallsNothing) {
  ThreadPool pool;
  for (const std::int64_t count : {std::int64_t{0}, std::int64_t{-3}})
    pool.run(count, 4, [](std::int64_t, int) { FAIL(); });
}

TEST(ThreadPool, WidthBelowOneIsOne) {
  ThreadPool pool;
  for (const int width : {0, -5}) {
    std::vector<std::int64_t> order;
    pool.run(5, width, [&](std::int64_t i, int slot) {
      EXPECT_EQ(slot, 0);
      order.push_back(i);
    });
    EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  }
}

TEST(ThreadPool, SlotsAreNotShared) {
  ThreadPool pool;
  for (const int width : {2, 3, 8}) {
    std::vector<std::atomic<bool>> taken(index(width));
    std::atomic<int> faults = 0, running = 0, most = 0;
    pool.run(2000, width, [&](std::int64_t, int slot) {
      const int now = ++running;
      int before = most;
      while (before < now && !most.compare_exchange_weak(before, now)) {
      }
      if (slot < 0 || slot >= width)
        ++faults;
      else if (taken[index(slot)].exchange(true))
        ++faults;
      std::this_thread::yield();
      if (slot >= 0 && slot < width) taken[index(slot)] = false;
      --running;
    });
    EXPECT_EQ(faults, 0);
    EXPECT_LE(most, width);
  }
}

// What the fused backward pass lives on: a task may wait for any task before it.
TEST(ThreadPool, ATaskMayWaitForTheOneBefore) {
  ThreadPool pool;
  for (const int width : {2, 3, 7}) {
    constexpr std::int64_t kTasks = 500;
    std::vector<std::atomic<bool>> started(kTasks), done(kTasks);
    std::atomic<int> late = 0;
    pool.run(kTasks, width, [&](std::int64_t i, int) {
      started[index(i)] = true;
      if (i > 0 && !wait_for([&] { return started[index(i - 1)].load(); })) ++late;
      if (i > 0 && late == 0 && !wait_for([&] { return done[index(i - 1)].load() || late > 0; })) ++late;
      done[index(i)] = true;
    });
    EXPECT_EQ(late, 0) << "width " << width;
  }
}

TEST(ThreadPool, WidthIsReallyUsed) {
  // Each task waits until all have begun, which only `width` threads can do. More of them than cores is no matter.
  ThreadPool pool;
  for (const int width : {2, usable_cores() + 3}) {
    std::atomic<int> begun = 0, alone = 0;
    pool.run(width, width, [&](std::int64_t, int) {
      ++begun;
      if (!wait_for([&] { return begun == width; })) ++alone;
    });
    EXPECT_EQ(alone, 0);
  }
}

TEST(ThreadPool, TheFirstExceptionComesBackAndThePoolLives) {
  ThreadPool pool;
  for (const int width : {1, 2, 5}) {
    std::atomic<int> running = 0, calls = 0;
    const auto body = [&](std::int64_t i, int) {
      ++running;
      ++calls;
      std::this_thread::yield();
      --running;
      if (i == 40) throw std::runtime_error("task 40");
    };
    try {
      pool.run(100'000, width, body);
      ADD_FAILURE() << "no exception, width " << width;
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "task 40");
    }
    EXPECT_EQ(running, 0) << "run() came back before its tasks";
    EXPECT_LT(calls, 100'000) << "what has not started is not worth starting";
    std::atomic<int> sum = 0;
    pool.run(100, width, [&](std::int64_t i, int) { sum += static_cast<int>(i); });
    EXPECT_EQ(sum, 4950);
  }
}

TEST(ThreadPool, ManyExceptionsAreOne) {
  ThreadPool pool;
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> thrown = 0;
    EXPECT_THROW(pool.run(64, 4,
                          [&](std::int64_t, int) {
                            ++thrown;
                            throw std::logic_error("each of them");
                          }),
                 std::logic_error);
    EXPECT_GE(thrown, 1);
    EXPECT_LE(thrown, 4);
  }
}

TEST(ThreadPool, JobsNest) {
  ThreadPool pool;
  std::atomic<std::int64_t> sum = 0;
  pool.run(20, 3, [&](std::int64_t i, int) {
    pool.run(10, 4,
             [&](std::int64_t j, int) { pool.run(3, 2, [&](std::int64_t k, int) { sum += 100 * i + 10 * j + k; }); });
  });
  EXPECT_EQ(sum, 100 * 190 * 30 + 10 * 45 * 60 + 3 * 200);
}

TEST(ThreadPool, AnExceptionOfAnInnerJobPassesThroughTheOuterOne) {
  ThreadPool pool;
  EXPECT_THROW(pool.run(8, 3,
                        [&](std::int64_t, int) {
                          pool.run(8, 3, [](std::int64_t j, int) {
                            if (j == 5) throw std::out_of_range("inner");
                          });
                        }),
               std::out_of_range);
}

TEST(ThreadPool, RanksShareIt) {
  ThreadPool pool;
  std::vector<std::atomic<std::int64_t>> sums(5);
  {
    std::vector<std::jthread> ranks;
    for (std::size_t rank = 0; rank < sums.size(); ++rank)
      ranks.emplace_back([&, rank] {
        for (int round = 0; round < 20; ++round)
          pool.run(100, 1 + static_cast<int>(rank), [&](std::int64_t i, int) { sums[rank] += i; });
      });
  }
  for (const auto& sum : sums) EXPECT_EQ(sum, 20 * 4950);
}

// Another rank's long tasks may hold every helper: a job then goes on with its own thread.
TEST(ThreadPool, NoJobNeedsAHelper) {
  ThreadPool pool;
  std::latch all_busy(3), release(1);
  std::jthread other([&] {
    pool.run(3, 3, [&](std::int64_t, int) {
      all_busy.count_down();
      release.wait();
    });
  });
  all_busy.wait();
  std::int64_t sum = 0;  // no atomic: this thread does everything
  pool.run(100, 3, [&](std::int64_t i, int) { sum += i; });
  EXPECT_EQ(sum, 4950);
  release.count_down();
}

TEST(ThreadPool, AnIdlePoolGoesAway) {
  for (int round = 0; round < 20; ++round) {
    ThreadPool pool;
    pool.run(round, 4, [](std::int64_t, int) {});
  }
}

TEST(ThreadPool, SharedIsOne) { EXPECT_EQ(&ThreadPool::shared(), &ThreadPool::shared()); }

TEST(UsableCores, AreThoseThatThisThreadMayRunOn) {
  EXPECT_GE(usable_cores(), 1);
#ifdef __linux__
  std::jthread([] {
    cpu_set_t allowed, one;
    ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    CPU_ZERO(&one);
    for (std::size_t cpu = 0; CPU_COUNT(&one) == 0; ++cpu)
      if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(usable_cores(), 1);
  }).join();
#endif
}

}  // namespace
}  // namespace annulus
