#include "cli/group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <optional>
#include <set>

#include "annulus/device_transports.h"
#include "annulus/rendezvous.h"
#include "annulus/thread_group.h"
#include "cli/environment.h"
#include "kernels/cuda/load.h"
#include "kernels/device.h"
#include "kernels/thread_pool.h"
#ifdef ANNULUS_WITH_MPI
#include "annulus/mpi.h"
#endif

namespace annulus::cli {
namespace {

std::atomic<bool> stop{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

// Signals to end, caught once each while ranks run.
class Signals {
 public:
  Signals() {
    struct sigaction action {};
    action.sa_handler = [](int) { stop = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (std::size_t i = 0; i < kCaught.size(); ++i) sigaction(kCaught[i], &action, &before_[i]);
  }
  ~Signals() {
    for (std::size_t i = 0; i < kCaught.size(); ++i) sigaction(kCaught[i], &before_[i], nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  static constexpr std::array<int, 2> kCaught = {SIGINT, SIGTERM};
  std::array<struct sigaction, 2> before_{};
};

TransportOptions transport_options(const GroupOptions& options, const std::string& who) {
  return {.timeout = options.timeout,
          .warn = [who](const std::string& text) { print_error(who + text); },
          .stop = &stop,
          .blocking = options.blocking};
}

// What one rank did and how it ended.
struct Outcome {
  int code = kRight;
  std::exception_ptr error;
  std::string last_events;
};

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// How many ranks before this one are on its host. A collective.
int index_on_host(Transport& transport) {
  const std::vector<std::string> hosts = transport.all_gather(host_name());
  const auto own = hosts.begin() + transport.rank();
  return static_cast<int>(std::count(hosts.begin(), own, *own));
}

// The GPU of rank `index` of a host; none: the CPU.
std::optional<int> device_of(const GroupOptions& options, int index) {
  const Device device = parse_device(options.device);
  if (!device.is_gpu) return {};
  const int count = cuda::load_backend().device_count();
  if (count == 0 || (device.index && *device.index >= count))
    throw DeviceError("--device must name a GPU that is there; got " + options.device + " of " + std::to_string(count) +
                      ": use one of them, or cpu");
  return device.index ? *device.index : index % count;
}

// The same for a process. Where one has no such GPU, all of them hear of it. A collective.
int device_together(const GroupOptions& options, Transport& transport) {
  const int index = index_on_host(transport);
  std::optional<int> device;
  std::string refusal;
  try {
    device = device_of(options, index);
  } catch (const std::exception& error) {
    refusal = error.what();
  }
  for (const std::string& text : transport.all_gather(refusal))
    if (!text.empty()) throw DeviceError(text);
  return *device;
}

std::string name_of(std::optional<int> device) { return device ? "cuda:" + std::to_string(*device) : ""; }

Outcome run_rank(Transport& transport, const GroupOptions& options, std::optional<int> device,
                 const std::function<int(Rank&)>& body) {
  Outcome outcome;
  Recorder recorder(options.recorded_events);
  try {
    Rank rank(transport, recorder, name_of(device));
    outcome.code = body(rank);
    transport.all_gather("");  // whoever is lost now is lost within the deadline; MPI_Finalize has none
    return outcome;
  } catch (const TransportError&) {  // the others know
    outcome.error = std::current_exception();
  } catch (const std::exception& error) {
    outcome.error = std::current_exception();
    transport.abort(error.what());
  }
  outcome.last_events = recorder.report();
  if (outcome.last_events.ends_with('\n')) outcome.last_events.pop_back();  // print_error ends the line
  return outcome;
}

void print_outcome(int rank, const Outcome& outcome) {
  const std::string who = "rank " + std::to_string(rank);
  print_error(who + ": " + failure_of(outcome.error).message);
  if (!outcome.last_events.empty()) print_error("the last events of " + who + ":\n" + outcome.last_events);
}

int run_threads(const Launch& launch, const GroupOptions& options, const std::function<int(Rank&)>& body) {
  std::vector<int> devices;
  for (int rank = 0; rank < launch.ranks; ++rank)
    if (const auto device = device_of(options, rank)) devices.push_back(*device);
  auto transports = devices.empty() ? make_thread_group(launch.ranks, transport_options(options, ""))
                                    : make_device_thread_group(launch.ranks, devices, transport_options(options, ""));
  std::vector<Outcome> outcomes(transports.size());
  {
    // The first rank stays in this thread: a lone rank needs no other.
    std::vector<std::jthread> threads;
    const auto run = [&](std::size_t i) {
      outcomes[i] = run_rank(*transports[i], options, device_of(options, static_cast<int>(i)), body);
      transports[i].reset();  // it has left; who still needs it fails
    };
    for (std::size_t i = 1; i < transports.size(); ++i) {
      try {
        threads.emplace_back(run, i);
      } catch (const std::system_error& error) {  // the ranks that run must not wait for those that never will
        const DeviceError refusal("a rank must have a thread; the system refused one to rank " + std::to_string(i) +
                                  " (" + error.what() + "): use fewer ranks");
        outcomes[i].error = std::make_exception_ptr(refusal);
        for (std::size_t j = i; j < transports.size(); ++j) transports[j]->abort(refusal.what());
        break;
      }
    }
    run(0);
  }
  int code = kRight;
  bool failed = false;
  std::set<std::string> said;
  // Who failed by itself is the cause; the others only heard of it.
  const bool has_cause = std::ranges::any_of(
      outcomes, [](const Outcome& o) { return o.error != nullptr && !failure_of(o.error).by_another_rank; });
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    code = std::max(code, outcomes[i].code);
    if (outcomes[i].error == nullptr) continue;
    if (outcomes.size() == 1) std::rethrow_exception(outcomes[i].error);
    const Failure failure = failure_of(outcomes[i].error);
    if (has_cause && failure.by_another_rank) continue;
    if (!failed) code = failure.code;
    failed = true;
    // What all of them were refused alike is said once.
    if (!failure.by_another_rank && !said.insert(failure.message).second) continue;
    print_outcome(static_cast<int>(i), outcomes[i]);
  }
  if (failed) throw Reported{code};
  return code;
}

// The rank of this process, over a transport of the host.
int run_process(std::unique_ptr<Transport> transport, const Launch& launch, const GroupOptions& options,
                const std::function<int(Rank&)>& body) {
  std::optional<int> device;
  if (parse_device(options.device).is_gpu) {
    device = device_together(options, *transport);
    if (launch.transport == "nccl")
      transport = make_nccl_transport(std::move(transport), *device,
                                      {.timeout = options.timeout, .blocking = options.blocking});
    else
      transport = make_staged_transport(std::move(transport), *device, {.blocking = options.blocking});
  }
  const int rank = transport->rank();
  const Outcome outcome = run_rank(*transport, options, device, body);
  if (outcome.error == nullptr) return outcome.code;
  // Before MPI ends, which may mean that this process ends.
  print_outcome(rank, outcome);
  throw Reported{failure_of(outcome.error).code};
}

std::string warning_of(int rank) { return "rank " + std::to_string(rank) + " warns: "; }

int run_met_process(const Launch& launch, const GroupOptions& options, const std::function<int(Rank&)>& body) {
  const int rank = launch.launcher.process;
  return run_process(
      make_rendezvous_transport(rank, launch.ranks, launch.rendezvous, transport_options(options, warning_of(rank))),
      launch, options, body);
}

#ifdef ANNULUS_WITH_MPI
int run_mpi_process(const Launch& launch, const GroupOptions& options, const std::function<int(Rank&)>& body) {
  MpiProcess process(nullptr, nullptr);
  if (process.size() != launch.ranks)
    throw DeviceError("MPI must see all processes of the job; it sees " + std::to_string(process.size()) + " of " +
                      std::to_string(launch.ranks) +
                      ": start them by the mpirun of the same MPI, or by srun with --mpi=pmix");
  return run_process(process.make_transport(transport_options(options, warning_of(process.rank()))), launch, options,
                     body);
}
#endif

}  // namespace

Rank::Rank(Transport& transport_, Recorder& recorder_, std::string device_)
    : transport(transport_), recorder(recorder_), device(std::move(device_)) {
  const std::string host = host_name();
  const std::string own = host + " " + usable_core_list();
  if (on_gpu()) gpu = cuda::load_backend().info(*parse_device(device).index).id;
  const std::vector<std::string> devices = transport.all_gather(host + " " + gpu);
  is_first_on_device =
      std::ranges::find(devices, devices[static_cast<std::size_t>(index())]) - devices.begin() == index();
  const std::vector<std::string> all = transport.all_gather(own);
  neighbours = {.host = host, .on_cores = 0, .is_first = true, .cores = usable_cores()};
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] != own) continue;
    ++neighbours.on_cores;
    if (static_cast<int>(i) < index()) neighbours.is_first = false;
  }
}

int Rank::default_threads() const { return std::max(1, neighbours.cores / neighbours.on_cores); }

Rank::SignOfLife::SignOfLife(Transport& transport) {
  if (transport.size() == 1) return;
  thread_ = std::jthread([&transport](const std::stop_token& end) {
    while (!end.stop_requested()) {
      try {
        transport.poll();
      } catch (const std::exception&) {
        return;  // the rank's own thread gets the same error from its next call
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
}

Rank::SignOfLife::~SignOfLife() = default;

void check_together(Rank& rank, const std::function<void()>& check) {
  std::string refusal;
  if (rank.reports()) {
    try {
      check();
    } catch (const std::exception&) {
      const Failure failure = failure_of(std::current_exception());
      refusal = (failure.code == kBadUsage ? "u" : "e") + failure.message;
    }
  }
  refusal = rank.transport.all_gather(refusal).front();
  if (refusal.empty()) return;
  try {
    rank.meet();                     // who ends first must not cut off others that are still being told
  } catch (const TransportError&) {  // they know by now
  }
  if (refusal[0] == 'u') throw InvalidArgument(refusal.substr(1));
  throw DeviceError(refusal.substr(1));
}

int run_ranks(const Launch& launch, const GroupOptions& options, const std::function<int(Rank&)>& body) {
  stop = false;
  const Signals signals;
#ifdef ANNULUS_WITH_MPI
  if (launch.by_mpi()) return run_mpi_process(launch, options, body);
#endif
  if (!launch.rendezvous.empty()) return run_met_process(launch, options, body);
  return run_threads(launch, options, body);
}

}  // namespace annulus::cli
