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
  std::list<Job*> place;         // its own place in the list of open jobs, kept here while it is not open

  bool joinable() const { return next < count && !free_slots.empty(); }
};

struct ThreadPool::Helper {
  std::thread thread;
  bool asleep = false;
  static inline thread_local const Helper* self = nullptr;  // of this thread, if it is one
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

  // A helper inherits the cores of who makes it; one that is made by another helper may use what that one avoids.
  void settle() {
    if (self != nullptr)
      home = self->home;
    else if (sched_getaffinity(0, sizeof home, &home) != 0)
      CPU_ZERO(&home);
  }
#else
  void avoid(int) {}
  void settle() {}
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

// As many helpers as the jobs of this moment can use, but no more than there are cores for; a job alone gets what it
// asks for. A system that gives no more threads only makes a job slower: no job needs a helper.
void ThreadPool::grow(int width) {
  if (static_cast<int>(helpers_.size()) >= demand_) return;
  const int helpers = std::min(demand_, std::max(width, usable_cores()) - 1);
  try {
    while (static_cast<int>(helpers_.size()) < helpers) {
      Helper& helper = helpers_.emplace_back();
      helper.settle();
      helper.thread = std::thread([this, &helper] { help(helper); });
    }
  } catch (const std::exception&) {
    if (!helpers_.empty() && !helpers_.back().thread.joinable()) helpers_.pop_back();
  }
}

// Neither needs memory: a job that has begun can go on to its end.
void ThreadPool::open(Job& job) { open_.splice(open_.end(), job.place); }
void ThreadPool::close(Job& job) {
  job.place.splice(job.place.end(), open_, std::find(open_.begin(), open_.end(), &job));
}

// Called and returns with the lock held. Tasks take tens of microseconds and more, so one lock a task is cheap.
void ThreadPool::run_one(Job& job, std::unique_lock<std::mutex>& lock) {
  const std::int64_t index = job.next++;
  const int slot = job.free_slots.back();
  job.free_slots.pop_back();
  ++job.running;
  if (!job.joinable()) close(job);
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
    if (was_open) close(job);
  } else if (!was_open && job.joinable()) {
    open(job);
    work_.notify_one();
  }
  job.idle.notify_all();
}

void ThreadPool::help(Helper& helper) {
  Helper::self = &helper;
  std::unique_lock lock(mutex_);
  for (;;) {
    helper.asleep = true;
    work_.wait(lock, [this] { return stopping_ || !open_.empty(); });
    helper.asleep = false;
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
  Job job{.body = f, .count = count, .free_slots = {}, .error = {}, .idle = {}, .place = {}};
  job.place.push_back(&job);
  for (int slot = width - 1; slot >= 0; --slot) job.free_slots.push_back(slot);
  std::unique_lock lock(mutex_);
  demand_ += width - 1;
  grow(width);
  open(job);
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
  demand_ -= width - 1;
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
