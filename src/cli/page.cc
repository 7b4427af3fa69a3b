#include "cli/page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <sstream>

#include "annulus/errors.h"
#include "cli/picture.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kMostCells = 96;       // of a picture of the pattern
constexpr std::int64_t kMostHeadsDrawn = 4;   // more look alike: phases repeat
constexpr double kMostGroupsDrawn = 1e6;      // a second or so
constexpr std::int64_t kMostRanksDrawn = 64;  // side by side in a picture of traffic
constexpr std::array<const char*, 5> kColours{"#3b82d6", "#e0862b", "#2ba38f", "#a65fd0", "#d6506b"};  // one a branch

constexpr const char* kStyle = R"(<style>
:root { color-scheme: light dark; --line: #8b93a044; --soft: #7a828e; --fill: #3b82d6; --other: #8b93a0; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { margin: 1.5rem 0 .3rem; font-size: 1rem; }
p, figcaption { margin: .3rem 0; } .soft, figcaption { color: var(--soft); }
code { font-size: .9em; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } table.bars { table-layout: fixed; } td, th { padding: .15rem .8rem .15rem 0; text-align: left;
  font-weight: normal; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
table.bars td:first-child { width: 30%; overflow-wrap: anywhere; } td.bar { width: 45%; } td.bar div { height: .8rem; margin-top: .35rem; background: var(--line); }
td.bar div div { margin: 0; background: var(--fill); } td.bar div div.other { background: var(--other); }
td.bar div div.wrong { background: #d6506b; } .wrong { color: #d6506b; } .right { color: #2ba38f; }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; }
</style>
)";

// ---- Text

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

std::string digits(double value, const char* format) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::int64_t whole(double value) { return static_cast<std::int64_t>(std::clamp(value, 0.0, 9e18)); }
std::string bytes_text(double bytes) { return format_bytes(whole(bytes)); }
std::string rate_text(double flop_per_s) {
  return flop_per_s < 1e12 ? digits(flop_per_s / 1e9, "%.3g GFLOP/s") : digits(flop_per_s / 1e12, "%.3g TFLOP/s");
}
std::string time_text(double ms) { return duration_text(ms / 1000); }

// ---- What an object has: nothing, where a key is missing or holds something else. The page then has a gap, not an
// error.

const Json* find(const Json& object, std::initializer_list<const char*> path) {
  const Json* at = &object;
  for (const char* key : path) {
    if (!at->is_object() || !at->contains(key)) return nullptr;
    at = &(*at)[key];
  }
  return at;
}

std::optional<double> number(const Json& object, std::initializer_list<const char*> path) {
  const Json* found = find(object, path);
  if (found == nullptr || !found->is_number()) return std::nullopt;
  const double value = found->get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::string text(const Json& object, std::initializer_list<const char*> path) {
  const Json* found = find(object, path);
  if (found == nullptr || found->is_null()) return "";
  return found->is_string() ? found->get<std::string>() : found->dump(-1, ' ', false, Json::error_handler_t::replace);
}

bool is_true(const Json& object, std::initializer_list<const char*> path) {
  const Json* found = find(object, path);
  return found != nullptr && found->is_boolean() && found->get<bool>();
}

std::string joined(const Json& object, std::initializer_list<const char*> path) {
  std::string result;
  if (const Json* list = find(object, path); list != nullptr && list->is_array())
    for (const Json& each : *list) result += (result.empty() ? "" : ", ") + text(each, {});
  return result;
}

// ---- Pieces of a page

struct Bar {
  std::string label;
  double value = 0;
  std::string text;
  const char* kind = "";  // a class of the style sheet
};

// Horizontal bars with one scale; `whole` is a full one.
std::string bars(const std::vector<Bar>& list, double whole) {
  std::ostringstream out;
  out << "<table class=\"bars\">\n";
  for (const Bar& bar : list) {
    const double share = whole > 0 ? std::clamp(bar.value / whole, 0.0, 1.0) : 0.0;
    out << "<tr><td>" << escaped(bar.label) << "</td><td class=\"bar\"><div><div class=\"" << bar.kind
        << "\" style=\"width:" << digits(100 * share, "%.2f") << "%\"></div></div></td><td class=\"n\">"
        << escaped(bar.text) << "</td></tr>\n";
  }
  out << "</table>\n";
  return out.str();
}

std::string bars(const std::vector<Bar>& list) {
  double whole = 0;
  for (const Bar& bar : list) whole = std::max(whole, bar.value);
  return bars(list, whole);
}

std::string heading(const std::string& title) { return "<h3>" + escaped(title) + "</h3>\n"; }
std::string soft(const std::string& line) {
  return line.empty() ? "" : "<p class=\"soft\">" + escaped(line) + "</p>\n";
}

std::string rectangle(double x, double y, double width, double height, const std::string& fill, double opacity = 1) {
  return "<rect x=\"" + digits(x, "%g") + "\" y=\"" + digits(y, "%g") + "\" width=\"" + digits(width, "%g") +
         "\" height=\"" + digits(height, "%g") + "\" fill=\"" + fill + "\"" +
         (opacity < 1 ? " fill-opacity=\"" + digits(opacity, "%.3f") + "\"" : "") + "/>";
}

std::string figure(std::int64_t cells, const std::string& label, const std::string& body, const std::string& caption) {
  const std::string side = std::to_string(cells);
  return "<figure><svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"" + escaped(label) +
         "\" viewBox=\"0 0 " + side + " " + side + "\" width=\"220\" height=\"220\" shape-rendering=\"crispEdges\">" +
         body + "<rect width=\"" + side + "\" height=\"" + side +
         "\" fill=\"none\" stroke=\"#8b93a0\" stroke-width=\"0.5%\"/></svg><figcaption>" + escaped(caption) +
         "</figcaption></figure>\n";
}

// ---- The problem

std::optional<Problem> problem_of(const Json& given) {
  try {
    Problem problem;
    given.at("tokens").get_to(problem.tokens);
    given.at("heads").get_to(problem.heads);
    given.at("kv_heads").get_to(problem.kv_heads);
    given.at("cu_seqlens").get_to(problem.documents);
    problem.causal = given.at("causal").get<bool>();
    problem.pattern.phase = parse_phase(given.at("phase").get<std::string>());
    for (const Json& each : given.at("branches")) {
      Branch branch;
      each.at("segment").get_to(branch.segment);
      each.at("dilation").get_to(branch.dilation);
      each.at("first_head").get_to(branch.first_head);
      each.at("head_count").get_to(branch.head_count);
      if (each.contains("classes")) each.at("classes").get_to(branch.classes);
      problem.pattern.branches.push_back(branch);
    }
    return resolve(problem);
  } catch (const Json::exception&) {
    return std::nullopt;
  } catch (const InvalidArgument&) {
    return std::nullopt;
  }
}

std::string draw_head(const Problem& problem, std::int64_t head) {
  const PatternMatrix matrix = pattern_matrix(problem, head, kMostCells);
  const auto paleness = [&](int branch) {  // a cell of many positions cannot show which of them take part
    const auto dilation = static_cast<double>(problem.pattern.branches[static_cast<std::size_t>(branch)].dilation);
    return matrix.block == 1 ? 1 : std::max(0.15, 1 / dilation);
  };
  std::string body;
  for (std::int64_t row = 0; row < matrix.cells; ++row)
    for (std::int64_t column = 0; column < matrix.cells;) {
      const int branch = matrix.at(row, column);
      std::int64_t end = column + 1;  // neighbours of one colour are one rectangle
      while (end < matrix.cells && matrix.at(row, end) == branch) ++end;
      if (branch != kNoBranch)
        body += rectangle(static_cast<double>(column), static_cast<double>(row), static_cast<double>(end - column), 1,
                          kColours[static_cast<std::size_t>(branch) % kColours.size()], paleness(branch));
      column = end;
    }
  std::string caption = "head " + std::to_string(head) + ", positions 0 to " + format_count(matrix.positions - 1) +
                        ": queries down, keys to the right";
  if (matrix.block > 1) caption += "; paler where every r-th takes part";
  return figure(matrix.cells, caption, body, caption);
}

// Groups that lie in a picture of the pattern.
double group_count(const Problem& problem) {
  double longest = 1, count = 0;
  for (const Branch& branch : problem.pattern.branches)
    longest = std::max(longest, static_cast<double>(std::min(branch.segment, problem.tokens)));
  for (const Branch& branch : problem.pattern.branches) {
    const auto segment = static_cast<double>(branch.segment), dilation = static_cast<double>(branch.dilation);
    count += 2 * longest / segment * (problem.pattern.phase == Phase::every ? std::min(dilation, segment) : 1);
  }
  return count;
}

// Heads whose phases differ, as far as they fit and can be told apart.
std::string draw_pattern(const Problem& problem) {
  if (problem.tokens == 0 || group_count(problem) > kMostGroupsDrawn) return "";
  std::int64_t period = 1;
  if (pattern_matrix(problem, 0, kMostCells).block == 1)
    for (const Branch& branch : problem.pattern.branches) period = std::max(period, branch.dilation);
  std::string result;
  for (std::int64_t head = 0; head < std::min({problem.heads, period, kMostHeadsDrawn}); ++head)
    result += draw_head(problem, head);
  result += "<p>";
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    result += "<span style=\"color:" + std::string(kColours[i % kColours.size()]) + "\">&#9632;</span> segment " +
              format_count(branch.segment) + ", dilation " + format_count(branch.dilation) + " &nbsp; ";
  }
  return result + "</p>\n";
}

std::string describe_problem(const Json& object) {
  if (find(object, {"problem", "tokens"}) == nullptr) return "";
  const auto count = [&](const char* key) { return format_count(whole(number(object, {"problem", key}).value_or(0))); };
  std::string line = count("tokens") + " tokens, " + count("heads") + " heads of " + count("head_dim") + ", " +
                     count("kv_heads") + " of keys and values, batch " + count("batch") + ", " +
                     text(object, {"problem", "dtype"}) + "; segments " + joined(object, {"problem", "segments"}) +
                     ", dilations " + joined(object, {"problem", "dilations"}) + ", phase " +
                     text(object, {"problem", "phase"});
  if (is_true(object, {"problem", "causal"})) line += ", causal";
  line += ", " + text(object, {"problem", "gradient"}) + " gradient";
  return line;
}

std::string plural(const Json& object, const char* key, const std::string& one) {
  const std::string count = text(object, {"environment", key});
  return count + " " + one + (count == "1" ? "" : "s");
}

std::string describe_environment(const Json& object) {
  const std::string gpu = text(object, {"environment", "gpu"});
  std::string line = "annulus " + text(object, {"environment", "version"}) + " on " +
                     (gpu.empty() ? text(object, {"environment", "cpu"}) : gpu) + ", " +
                     (gpu.empty() ? text(object, {"environment", "instruction_set"}) + ", " +
                                        plural(object, "threads", "thread") + " a rank"
                                  : text(object, {"environment", "kernel"}) + " kernel");
  const double ranks = number(object, {"environment", "ranks"}).value_or(1);
  if (ranks > 1)
    line += ", " + plural(object, "ranks", "rank") + " by " + text(object, {"environment", "transport"}) + ", layout " +
            text(object, {"sharding", "layout"}) + ", strategy " + text(object, {"sharding", "strategy"});
  return line;
}

// ---- What the commands found

// Checks of bits, a line for each way of computing again.
std::string draw_bits(const Json& checks) {
  struct Line {
    std::string what, same, different;
  };
  std::vector<Line> lines;
  for (const Json& check : checks) {
    if (number(check, {"bound"}).value_or(0) > 0) continue;
    const std::string what = text(check, {"what"}), tensor = text(check, {"tensor"});
    auto line = std::ranges::find(lines, what, &Line::what);
    if (line == lines.end()) line = lines.insert(line, {what, "", ""});
    if (is_true(check, {"passed"}))
      line->same += tensor + " ";
    else
      line->different += tensor + " in " + digits(number(check, {"max_error"}).value_or(0), "%.0f elements ");
  }
  if (lines.empty()) return "";
  std::string result = heading("Bits") + "<table>\n";
  for (const Line& line : lines) {
    result += "<tr><td>" + escaped(line.what) + "</td><td>";
    if (!line.same.empty()) result += escaped(line.same) + "the same";
    if (!line.different.empty()) result += " <span class=\"wrong\">" + escaped(line.different) + "differ</span>";
    result += "</td></tr>\n";
  }
  return result + "</table>\n";
}

std::string draw_checks(const Json& object) {
  const Json* checks = find(object, {"checks"});
  if (checks == nullptr || !checks->is_array()) return "";
  std::vector<Bar> errors;
  for (const Json& check : *checks) {
    const double bound = number(check, {"bound"}).value_or(0);
    const auto error = number(check, {"max_error"});
    if (bound > 0)
      errors.push_back({text(check, {"what"}) + ": " + text(check, {"tensor"}), error ? *error / bound : 1,
                        (error ? digits(*error, "%.2g") : "infinite") + " of " + digits(bound, "%.2g"),
                        is_true(check, {"passed"}) ? "" : "wrong"});
  }
  std::string result = std::string("<p><b class=\"") +
                       (is_true(object, {"passed"}) ? "right\">passed" : "wrong\">failed") +
                       "</b>: " + std::to_string(checks->size()) + " checks</p>\n";
  if (!errors.empty())
    result +=
        heading("Largest error, against what textbook attention in the same type may be off by") + bars(errors, 1);
  return result + draw_bits(*checks);
}

std::string draw_speed(const Json& object) {
  std::vector<Bar> times, shares;
  for (const char* pass : {"forward", "backward"}) {
    const auto median = number(object, {pass, "ms", "median"});
    if (!median) continue;
    const auto end = [&](const char* key) { return time_text(number(object, {pass, "ms", key}).value_or(0)); };
    times.push_back({pass, *median, time_text(*median) + " (" + end("best") + " to " + end("worst") + ")"});
    if (const auto share = number(object, {pass, "peak_fraction"}))
      shares.push_back(
          {pass, *share,
           rate_text(number(object, {pass, "flop_per_s"}).value_or(0)) + ", " + digits(100 * *share, "%.1f %%")});
  }
  if (times.empty()) return "";
  std::string result = heading("Time, median of the rounds") + bars(times);
  if (!shares.empty())
    result += heading("Share of the peak measured in the same run (" + text(object, {"peak_instruction"}) + ")") +
              bars(shares, 1);
  if (const auto exposed = number(object, {"communication", "exposed_fraction"});
      exposed && number(object, {"environment", "ranks"}).value_or(1) > 1)
    result += soft("waiting for other ranks: " + digits(100 * *exposed, "%.1f %%") + " of the time");
  return result;
}

std::string draw_components(const Json& memory) {
  std::vector<Bar> list;
  if (const Json* components = find(memory, {"components"}); components != nullptr && components->is_object())
    for (const auto& [name, bytes] : components->items())
      if (bytes.is_number()) list.push_back({name, bytes.get<double>(), bytes_text(bytes.get<double>())});
  std::ranges::stable_sort(list, std::ranges::greater(), &Bar::value);
  return list.empty() ? "" : bars(list);
}

std::string draw_memory(const Json& object) {
  std::string result;
  if (const auto peak = number(object, {"memory", "peak_bytes"})) {
    const double planned = number(object, {"memory", "plan_bytes"}).value_or(0);
    result += heading("Memory of the largest rank") +
              bars({{"taken at most", *peak, bytes_text(*peak)}, {"planned", planned, bytes_text(planned), "other"}}) +
              soft("by component, each at its own peak:") + draw_components(object["memory"]);
  }
  for (const char* pass : {"forward", "backward"})
    if (const auto bytes = number(object, {"memory", pass, "bytes"}))
      result += heading("Planned memory of the largest rank, " + std::string(pass) + ": " + bytes_text(*bytes)) +
                draw_components(object["memory"][pass]);
  return result;
}

std::string draw_peers(const Json& object) {
  const Json* peers = find(object, {"traffic", "peers"});
  const std::int64_t ranks = whole(number(object, {"environment", "ranks"}).value_or(0));
  if (peers == nullptr || !peers->is_array() || ranks < 2 || ranks > kMostRanksDrawn) return "";
  double most = 0;
  for (const Json& each : *peers) most = std::max(most, number(each, {"bytes"}).value_or(0));
  std::string body;
  for (const Json& each : *peers) {
    const double bytes = number(each, {"bytes"}).value_or(0);
    if (bytes > 0)
      body += rectangle(number(each, {"to"}).value_or(0), number(each, {"from"}).value_or(0), 1, 1, "#3b82d6",
                        0.15 + 0.85 * bytes / most);
  }
  return figure(ranks, "who sends to whom", body, "senders down, receivers to the right, at most " + bytes_text(most));
}

std::string draw_traffic(const Json& object) {
  std::vector<Bar> list;
  const auto add = [&](const char* label, const char* key, const char* kind) {
    if (const auto bytes = number(object, {"traffic", key})) list.push_back({label, *bytes, bytes_text(*bytes), kind});
  };
  add("sent", "sent_bytes", "");
  add("planned", "plan_bytes", "other");
  add("the least that would do", "minimum_bytes", "other");
  add("a ring of whole shards", "ring_bytes", "other");
  const bool any = std::ranges::any_of(list, [](const Bar& bar) { return bar.value > 0; });
  return any ? heading("Traffic of all ranks") + bars(list) + draw_peers(object) : "";
}

std::string draw_plan(const Json& object) {
  std::string result = std::string("<p><b class=\"") +
                       (is_true(object, {"fits"}) ? "right\">fits" : "wrong\">does not fit") + "</b>: needs " +
                       bytes_text(number(object, {"memory", "plan_bytes"}).value_or(0)) + " of " +
                       bytes_text(number(object, {"memory", "available_bytes"}).value_or(0)) + "</p>\n";
  const Json* strategies = find(object, {"strategy"});
  if (strategies != nullptr && strategies->is_array()) {
    result += heading("Strategy by branch") + "<table>\n";
    for (const Json& each : *strategies)
      result += "<tr><td>" + escaped(text(each, {"branch"})) + "</td><td>" + escaped(text(each, {"strategy"})) +
                "</td><td>" + escaped(text(each, {"why"})) + "</td></tr>\n";
    result += "</table>\n";
  }
  return result;
}

std::string draw_run(const Json& object) {
  std::string result;
  if (const auto seconds = number(object, {"seconds"})) result += soft("took " + time_text(*seconds * 1000));
  const Json* sums = find(object, {"checksum"});
  if (sums == nullptr || !sums->is_object()) return result;
  result += heading("Checksums") + "<table>\n";
  for (const auto& [name, sum] : sums->items())
    result += "<tr><td>" + escaped(name) + "</td><td><code>" +
              escaped(sum.is_string() ? sum.get<std::string>() : sum.dump()) + "</code></td></tr>\n";
  return result + "</table>\n";
}

std::string draw_info(const Json& object) {
  return soft("instruction sets " + joined(object, {"instruction_sets"}) + "; " + text(object, {"cores"}) +
              " cores; devices " + joined(object, {"devices"}) + "; transports " + joined(object, {"transports"}));
}

// Measurements of one problem that differ in the number of ranks, side by side.
std::string draw_ranks(const std::vector<NamedReport>& reports) {
  std::string result;
  std::vector<std::string> seen;
  for (const NamedReport& first : reports) {
    const std::string problem = describe_problem(first.object);
    if (command_of(first.object) != "bench" || std::ranges::find(seen, problem) != seen.end()) continue;
    seen.push_back(problem);
    std::vector<const NamedReport*> alike;
    for (const NamedReport& other : reports)
      if (command_of(other.object) == "bench" && describe_problem(other.object) == problem) alike.push_back(&other);
    if (alike.size() < 2) continue;
    result += "<h2>Side by side</h2>\n" + soft(problem);
    const auto chart = [&](const char* title, auto value, auto label) {
      std::vector<Bar> list;
      for (const NamedReport* each : alike)
        if (const std::optional<double> found = value(each->object))
          list.push_back({each->name + ", " + plural(each->object, "ranks", "rank"), *found, label(*found)});
      if (!list.empty()) result += heading(title) + bars(list);
    };
    chart(
        "Forward",
        [](const Json& object) {
          return number(object, {"forward", "ms", "median"});
        },
        time_text);
    chart(
        "Backward",
        [](const Json& object) {
          return number(object, {"backward", "ms", "median"});
        },
        time_text);
    chart(
        "Memory a rank",
        [](const Json& object) {
          return number(object, {"memory", "peak_bytes"});
        },
        bytes_text);
    chart(
        "Bytes sent",
        [](const Json& object) {
          return number(object, {"traffic", "sent_bytes"});
        },
        bytes_text);
  }
  return result;
}

std::string draw(const NamedReport& report, std::vector<std::string>& drawn_patterns) {
  const Json& object = report.object;
  const std::string command = command_of(object);
  std::string result = "<h2>" + command + " <span class=\"soft\">" + escaped(report.name) + "</span></h2>\n";
  const std::string problem = describe_problem(object);
  if (!problem.empty()) result += "<p>" + escaped(problem) + "</p>\n";
  result += soft(describe_environment(object));
  if (const std::string typed = text(object, {"environment", "command"}); !typed.empty())
    result += "<p><code>" + escaped(typed) + "</code></p>\n";
  if (std::ranges::find(drawn_patterns, problem) == drawn_patterns.end()) {
    drawn_patterns.push_back(problem);
    if (const Json* given = find(object, {"problem"}); given != nullptr)
      if (const auto found = problem_of(*given)) result += draw_pattern(*found);
  }
  if (command == "info") return result + draw_info(object);
  if (command == "verify") return result + draw_checks(object);
  if (command == "plan") result += draw_plan(object);
  if (command == "run") result += draw_run(object);
  return result + draw_speed(object) + draw_traffic(object) + draw_memory(object);
}

}  // namespace

std::string command_of(const Json& object) {
  if (!object.is_object() || !object.contains("environment")) return "";
  if (object.contains("checks")) return "verify";
  if (object.contains("fits")) return "plan";
  if (object.contains("checksum")) return "run";
  if (object.contains("instruction_sets")) return "info";
  return object.contains("forward") ? "bench" : "";
}

std::string draw_page(const std::string& title, const std::vector<NamedReport>& reports) {
  std::string page =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
      escaped(title) + "</title>\n" + kStyle + "</head><body>\n<h1>" + escaped(title) +
      "</h1>\n<p class=\"soft\">Exact dilated attention: what was asked for, and what came of it</p>\n";
  page += draw_ranks(reports);
  std::vector<std::string> drawn_patterns;
  for (const NamedReport& report : reports) page += draw(report, drawn_patterns);
  return page + "</body></html>\n";
}

}  // namespace annulus::cli
