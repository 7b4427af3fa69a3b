#include "kernels/thread_pool.h"

#include <algorithm>
#include <exception>
#include <system_error>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace annulus {

struct ThreadPool::Job {
  const Body& body;
  std::int64_t count;
  std::int64_t next = 0;
  int running = 0;
  std::vector<int> free_slots;
  std::exception_ptr error;
  std::condition_variable idle;  // a task of this job ended

  bool joinable() const { return next < count && !free_slots.empty(); }
};

struct ThreadPool::Helper {
  std::thread thread;
  bool asleep = false;
#ifdef __linux__
  cpu_set_t home = {};       // the cores that it may run on
  int avoided = -1;          // the one of them that it keeps away from
  pid_t process = getpid();  // a forked child has the record of a helper, not the helper

  // A thread that is woken on its waker's core waits behind it until the system moves it, which takes milliseconds: a
  // caller that computes at once must have its helpers wake elsewhere. Every wait for the lock is such a moment too, so
  // they keep away until somebody wakes them from another core.
  void avoid(int core) {
    if (core == avoided || core < 0 || core >= CPU_SETSIZE || process != getpid()) return;
    cpu_set_t elsewhere = home;
    CPU_CLR(static_cast<std::size_t>(core), &elsewhere);
    if (CPU_COUNT(&elsewhere) == 0) return;
    if (pthread_setaffinity_np(thread.native_handle(), sizeof elsewhere, &elsewhere) == 0) avoided = core;
  }
#else
  void avoid(int) {}
#endif
};

namespace {

int this_core() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

}  // namespace

ThreadPool::ThreadPool() = default;

ThreadPool& ThreadPool::shared() {
  // Never destroyed: in a forked child its helpers do not exist, and tearing it down would wait for them.
  static ThreadPool& pool = *new ThreadPool;
  return pool;
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (Helper& helper : helpers_) helper.thread.join();
}

// A system that gives no more threads only makes a job slower: no job needs a helper.
void ThreadPool::grow(int helpers) {
  try {
    while (static_cast<int>(helpers_.size()) < helpers) {
      Helper& helper = helpers_.emplace_back();
#ifdef __linux__
      if (sched_getaffinity(0, sizeof helper.home, &helper.home) != 0) CPU_ZERO(&helper.home);
#endif
      helper.thread = std::thread([this, &helper] { help(helper); });
    }
  } catch (const std::system_error&) {
    helpers_.pop_back();
  }
}

// Called and returns with the lock held. Tasks take tens of microseconds and more, so one lock a task is cheap.
void ThreadPool::run_one(Job& job, std::unique_lock<std::mutex>& lock) {
  const std::int64_t index = job.next++;
  const int slot = job.free_slots.back();
  job.free_slots.pop_back();
  ++job.running;
  if (!job.joinable()) open_.remove(&job);
  lock.unlock();
  std::exception_ptr error;
  try {
    job.body(index, slot);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  const bool was_open = job.joinable();
  job.free_slots.push_back(slot);
  --job.running;
  if (error) {
    if (!job.error) job.error = error;
    job.next = job.count;  // what has not started is not worth starting
    if (was_open) open_.remove(&job);
  } else if (!was_open && job.joinable()) {
    open_.push_back(&job);
    work_.notify_one();
  }
  job.idle.notify_all();
}

void ThreadPool::help(Helper& self) {
  std::unique_lock lock(mutex_);
  for (;;) {
    self.asleep = true;
    work_.wait(lock, [this] { return stopping_ || !open_.empty(); });
    self.asleep = false;
    if (stopping_) return;
    Job& job = *open_.front();
    open_.splice(open_.end(), open_, open_.begin());
    run_one(job, lock);
  }
}

void ThreadPool::run(std::int64_t count, int width, const Body& f) {
  if (count <= 0) return;
  width = static_cast<int>(std::clamp<std::int64_t>(width, 1, count));
  if (width == 1) {
    for (std::int64_t i = 0; i < count; ++i) f(i, 0);
    return;
  }
  Job job{.body = f, .count = count, .free_slots = {}, .error = {}, .idle = {}};
  for (int slot = width - 1; slot >= 0; --slot) job.free_slots.push_back(slot);
  std::unique_lock lock(mutex_);
  grow(width - 1);
  open_.push_back(&job);
  const int core = this_core();
  for (Helper& helper : helpers_)
    if (helper.asleep) helper.avoid(core);
  work_.notify_all();
  // Helpers may hold every slot for a moment; then there is one to wait for.
  while (job.next < job.count) {
    if (job.joinable())
      run_one(job, lock);
    else
      job.idle.wait(lock);
  }
  job.idle.wait(lock, [&] { return job.running == 0; });
  if (job.error) std::rethrow_exception(job.error);
}

int usable_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace annulus
