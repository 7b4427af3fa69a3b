// The ranks of a command: threads of this process, or this process as one of several, of an MPI job or met elsewhere.
// One function runs on all of them, whichever they are.
//
//   return run_ranks(launch, {.timeout = 60s}, [&](Rank& rank) { ...; return kRight; });
//
// A signal to end (SIGINT, SIGTERM) makes every rank give up; a second one ends the process at once.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "annulus/recorder.h"
#include "annulus/transport.h"
#include "cli/failure.h"
#include "cli/launcher.h"

namespace annulus::cli {

struct GroupOptions {
  std::string device = "cpu";  // or "cuda": the GPUs of a host, in turn; or "cuda:1": that one
  std::chrono::milliseconds timeout{60'000};
  bool blocking = false;
  std::size_t recorded_events = 64;
};

// How a rank shares its machine with others.
struct Neighbours {
  std::string host;
  int on_cores = 1;      // ranks that may use the very same cores, this one included
  bool is_first = true;  // of those
  int cores = 1;         // that they share
};

class Rank {
 public:
  Rank(Transport& transport, Recorder& recorder, std::string device = "");  // a collective

  Transport& transport;
  Recorder& recorder;
  std::string device;  // "cuda:1"; empty: the CPU
  std::string gpu;     // which one of its host that is: several processes may each have a "cuda:0" of their own
  bool is_first_on_device = true;
  Neighbours neighbours;

  bool on_gpu() const { return !device.empty(); }
  int index() const { return transport.rank(); }
  bool reports() const { return index() == 0; }
  // Threads of this rank where nobody says otherwise: its share of the cores.
  int default_threads() const;

  // Every rank comes here before any goes on.
  void meet() { transport.all_gather(""); }

  // For work that knows nothing of ranks, on one rank or on all: meanwhile somebody else answers for this rank, so that
  // nobody takes it for lost.
  template <class F>
  void busy(F f) {
    {
      const SignOfLife sign(transport);
      f();
    }
    transport.poll();  // throws where the group has failed meanwhile
  }

 private:
  class SignOfLife {
   public:
    explicit SignOfLife(Transport& transport);
    ~SignOfLife();
    SignOfLife(const SignOfLife&) = delete;
    SignOfLife& operator=(const SignOfLife&) = delete;

   private:
    std::jthread thread_;
  };
};

// Rank 0 looks; what it refuses, every rank refuses alike. A collective.
void check_together(Rank& rank, const std::function<void()>& check);

// Returns the largest exit code of the ranks in this process. Where one fails, prints what each has to say and what it
// did last, and throws Reported; a lone rank's exception is passed on as it is.
int run_ranks(const Launch& launch, const GroupOptions& options, const std::function<int(Rank&)>& body);

}  // namespace annulus::cli
