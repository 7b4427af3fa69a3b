#include "cli/trace.h"

#include <algorithm>
#include <map>
#include <optional>

#include "cli/collection.h"
#include "cli/report.h"
#include "exec/forecast.h"
#include "exec/messages.h"
#include "io/atomic_file.h"
#include "kernels/device.h"

namespace annulus::cli {
namespace {

enum Track { kPasses = 1, kCompute, kTransfers, kWaits, kKernels, kCopies };

using Time = Trace::Clock::time_point;

// The events of one rank, as text between commas.
class EventWriter {
 public:
  EventWriter(int rank, Time origin) : rank_(rank), origin_(origin) {}

  void name_tracks(bool on_gpu) {
    add("M", "process_name", kPasses, origin_, {{"args", {{"name", "rank " + std::to_string(rank_)}}}});
    add("M", "process_sort_index", kPasses, origin_, {{"args", {{"sort_index", rank_}}}});
    const std::pair<Track, const char*> tracks[] = {
        {kPasses, "passes"}, {kCompute, "compute"}, {kTransfers, "send and receive"}, {kWaits, "wait"}};
    for (const auto& [track, name] : tracks) name_track(track, name);
    if (!on_gpu) return;
    name_track(kKernels, "GPU kernels");
    name_track(kCopies, "GPU copies");
  }
  void slice(Track track, const std::string& name, Time begin, Time end, Json args) {
    add("X", name, track, begin, {{"dur", microseconds(end - begin)}, {"args", std::move(args)}});
  }
  void slots(Time when, std::int64_t bytes) {
    add("C", "bytes in slots", kTransfers, when, {{"args", {{"bytes", bytes}}}});
  }
  // An arrow's two ends have the same id; each belongs to the slice around it.
  void arrow_begin(Time when, const std::string& id) { add("s", "transfer", kTransfers, when, arrow(id)); }
  void arrow_end(Time when, const std::string& id) {
    Json more = arrow(id);
    more["bp"] = "e";
    add("f", "transfer", kWaits, when, more);
  }

  std::string take() { return std::move(text_); }

 private:
  void name_track(Track track, const char* name) {
    add("M", "thread_name", track, origin_, {{"args", {{"name", name}}}});
    add("M", "thread_sort_index", track, origin_, {{"args", {{"sort_index", static_cast<int>(track)}}}});
  }
  static Json arrow(const std::string& id) { return {{"cat", "transfer"}, {"id", id}}; }
  static double microseconds(Trace::Clock::duration time) {
    return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()) / 1e3;
  }

  void add(const char* kind, const std::string& name, Track track, Time when, const Json& more) {
    Json event = {{"ph", kind},
                  {"name", name},
                  {"pid", rank_},
                  {"tid", static_cast<int>(track)},
                  {"ts", microseconds(when - origin_)}};
    event.update(more);
    text_ += (text_.empty() ? "" : ",\n") + event.dump();
  }

  int rank_;
  Time origin_;
  std::string text_;
};

// Who exchanges what with this rank, by the plan that the passes ran.
struct Partners {
  std::vector<int> to, from;
  std::int64_t arriving_bytes = 0;
};

Partners partners_of(const Forecast& forecast, Pass pass, std::int64_t e) {
  Partners partners;
  if (e < 1) {  // of segments that are dealt out
    const Resharding::Partners dealt = forecast.resharding().partners(pass, e == kComeHome);
    return {dealt.to, dealt.from, dealt.arriving_bytes};
  }
  if (e > forecast.count_exchanges(pass)) return partners;
  partners.to = peers_of(forecast.freight(pass).schedule.exchange(e).sends, forecast.returning(pass, e).returns);
  for (const Arrival& arrival : forecast.arrivals(pass, e)) {
    partners.from.push_back(arrival.peer);
    partners.arriving_bytes += forecast.bytes(pass, arrival);
  }
  return partners;
}

std::string arrow_id(std::size_t pass, std::int64_t exchange, int from, int to) {
  return std::to_string(pass) + "." + std::to_string(exchange) + "." + std::to_string(from) + "." + std::to_string(to);
}

std::string transfer_name(std::int64_t exchange) {
  if (exchange == kGoOut) return "go out";
  return exchange == kComeHome ? "come home" : "exchange " + std::to_string(exchange);
}

}  // namespace

bool is_waiting(const Event& event) {
  // `gather`, and `merge` of replicated queries, post and wait in one; the other `merge` is exchange 0.
  return event.what == "wait" || event.what == "gather" || (event.what == "merge" && event.exchange > 0);
}

Trace::Trace(Rank& rank, bool watches_device) : rank_(rank), origin_(Time::max()) {
  if (watches_device && rank.on_gpu()) timeline_ = cuda::load_backend().timeline(*parse_device(rank.device).index);
  rank.meet();
  // Ranks of one machine have one clock, and count from the moment of the first of them.
  const std::string host = rank.neighbours.host + " ";
  const auto ticks = Clock::now().time_since_epoch().count();
  for (const std::string& text : rank.transport.all_gather(host + std::to_string(ticks)))
    if (text.starts_with(host))
      origin_ = std::min(origin_, Time(Clock::duration(std::stoll(text.substr(host.size())))));
}

void Trace::add_pass(Pass pass, Clock::time_point begin) { passes_.push_back({pass, begin, Clock::now()}); }

std::string Trace::events_text(const Problem& problem, const Sharding& sharding, const RankOptions& options) const {
  const Plan plan = make_plan(problem);
  const bool streams = options.strategy != Strategy::replicated && !options.reproducible;
  std::optional<Forecast> forecast;
  if (streams) forecast.emplace(problem, plan, sharding, rank_.index(), options);
  EventWriter writer(rank_.index(), origin_);
  writer.name_tracks(timeline_ != nullptr);
  for (const cuda::DeviceSlice& slice : timeline_ != nullptr ? timeline_->slices() : std::vector<cuda::DeviceSlice>{}) {
    const bool is_copy = std::string_view(slice.what) == "copy";
    writer.slice(is_copy ? kCopies : kKernels, slice.what, slice.begin, slice.end, {{"bytes", slice.bytes}});
  }
  const std::vector<Event> events = rank_.recorder.events();
  for (std::size_t i = 0; i < passes_.size(); ++i) {
    const TracedPass& pass = passes_[i];
    writer.slice(kPasses, pass.pass == Pass::forward ? "forward" : "backward", pass.begin, pass.end, Json::object());
    // Other ways to go round number their exchanges in their own way: no arrows then.
    const bool by_this_plan = streams && (pass.pass == Pass::forward || forecast->alone().empty());
    const auto partners_in = [&](std::int64_t e) {
      return by_this_plan ? partners_of(*forecast, pass.pass, e) : Partners{};
    };
    std::map<std::int64_t, Event> posted;
    std::int64_t in_other_slot = 0;
    for (const Event& event : events) {
      if (event.begin < pass.begin || event.end > pass.end) continue;
      const std::int64_t e = event.exchange;
      const std::string name = std::string(event.what) + " " + std::to_string(e);
      if (event.what == "post") {
        const Partners partners = partners_in(e);
        posted[e] = event;
        writer.slots(event.begin, in_other_slot + partners.arriving_bytes);
        in_other_slot = partners.arriving_bytes;
        for (const int to : partners.to) writer.arrow_begin(event.begin, arrow_id(i, e, rank_.index(), to));
      } else if (is_waiting(event)) {
        const Partners partners = partners_in(e);
        writer.slice(kWaits, name, event.begin, event.end, {{"exchange", e}});
        const auto last = event.end > event.begin ? event.end - std::chrono::nanoseconds(1) : event.begin;
        for (const int from : partners.from) writer.arrow_end(last, arrow_id(i, e, from, rank_.index()));
        if (const auto post = posted.find(e); post != posted.end())
          writer.slice(
              kTransfers, transfer_name(e), post->second.begin, event.end,
              {{"exchange", e}, {"sent_bytes", post->second.bytes}, {"received_bytes", partners.arriving_bytes}});
      } else {
        writer.slice(kCompute, name, event.begin, event.end, {{"exchange", e}});
      }
    }
    writer.slots(pass.end, 0);
  }
  return writer.take();
}

void Trace::write(const std::string& path, const Problem& problem, const Sharding& sharding,
                  const RankOptions& options) const {
  const std::vector<std::string> texts = collect_texts(rank_.transport, events_text(problem, sharding, options));
  if (!rank_.reports()) return;
  AtomicFile file(path);
  file.write(std::string_view("{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n"));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (i > 0) file.write(std::string_view(",\n"));
    file.write(texts[i]);
  }
  file.write(std::string_view("\n]}\n"));
  file.commit();
}

}  // namespace annulus::cli
