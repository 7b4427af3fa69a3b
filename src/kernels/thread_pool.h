// The threads of the process, shared by whatever ranks live in it.
//
// The caller always works on its own job; idle helpers take tasks from any job, round robin, so unequal ranks balance.
// No job needs a helper to make progress. Tasks of a job start in order of their index, so a task may wait for one with
// a smaller index.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>

namespace annulus {

class ThreadPool {
 public:
  // f(index, slot): no two calls that run at the same time share a slot, and 0 <= slot < width.
  using Body = std::function<void(std::int64_t, int)>;

  static ThreadPool& shared();

  ThreadPool();
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls f for every index in [0, count) on at most `width` threads, this one included. The first exception is
  // rethrown here.
  void run(std::int64_t count, int width, const Body& f);

 private:
  struct Job;
  struct Helper;

  void grow(int width);
  void help(Helper& helper);
  void open(Job& job);
  void close(Job& job);
  void run_one(Job& job, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable work_;
  std::list<Job*> open_;  // jobs that a helper may join: tasks left and a slot free
  std::list<Helper> helpers_;
  int demand_ = 0;  // helpers that the jobs of this moment could use
  bool stopping_ = false;
};

// Cores that this process may run on.
int usable_cores();

}  // namespace annulus
