#include "cli/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "cli/environment.h"
#include "io/atomic_file.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

std::string joined(const std::vector<std::int64_t>& values) {
  std::string text;
  for (const std::int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

std::vector<std::int64_t> of_branches(const Pattern& pattern, std::int64_t Branch::*member) {
  std::vector<std::int64_t> values;
  for (const Branch& branch : pattern.branches) values.push_back(branch.*member);
  return values;
}

Json branches_json(const Pattern& pattern) {
  Json list = Json::array();
  for (const Branch& branch : pattern.branches) {
    Json entry = {{"segment", branch.segment},
                  {"dilation", branch.dilation},
                  {"first_head", branch.first_head},
                  {"head_count", branch.head_count}};
    if (pattern.phase == Phase::table) entry["classes"] = branch.classes;
    list.push_back(entry);
  }
  return list;
}

// Columns of a terminal: UTF-8 continuation bytes take none.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u; }));
}

}  // namespace

std::ostream& text_output(const ReportOptions& options) {
  static std::ostream nowhere(nullptr);
  return options.quiet || options.json == "-" ? nowhere : std::cout;
}

void check_report(const ReportOptions& options) {
  if (!options.json.empty() && options.json != "-")
    AtomicFile probe(options.json);  // not committed: leaves nothing behind
}

void write_report(const ReportOptions& options, const Json& object) {
  if (options.json.empty()) return;
  const std::string text = object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (options.json == "-") {
    std::cout << text;
    return;
  }
  AtomicFile file(options.json);
  file.write(text);
  file.commit();
}

Json problem_json(const CommandOptions& options, const Problem& problem) {
  const Pattern& pattern = problem.pattern;
  return {{"tokens", problem.tokens},
          {"batch", problem.batch},
          {"heads", problem.heads},
          {"kv_heads", problem.kv_heads},
          {"head_dim", problem.head_dim},
          {"dtype", name(problem.dtype)},
          {"segments", of_branches(pattern, &Branch::segment)},
          {"dilations", of_branches(pattern, &Branch::dilation)},
          {"preset", options.problem.preset.value_or(std::string(name(Preset::longnet)))},
          {"phase", name(pattern.phase)},
          {"branches", branches_json(pattern)},
          {"gradient", name(pattern.gradient)},
          {"pad_like_torchscale", pattern.pad_like_torchscale},
          {"output_scale", pattern.output_scale},
          {"causal", problem.causal},
          {"scale", *problem.scale},
          {"cu_seqlens", problem.documents},
          {"seed", make_seed(options.problem)},
          {"backward", options.problem.backward},
          {"deterministic", true},
          {"reproducible", true}};
}

Json environment_json(const std::string& instruction_set, int threads) {
  return {{"version", version()}, {"device", "cpu"}, {"cpu", cpu_model()}, {"instruction_set", instruction_set},
          {"launcher", "none"},   {"ranks", 1},      {"threads", threads}};
}

Json memory_json(const MemoryLedger& ledger, std::int64_t plan_bytes) {
  Json components = Json::object();
  for (const MemoryComponent& component : ledger.components()) components[component.name] = component.bytes;
  return {{"peak_bytes", ledger.peak_bytes()},
          {"plan_bytes", plan_bytes},
          {"components", components},
          {"process_peak_bytes", process_peak_bytes()}};
}

Json traffic_json() {
  const Json none = {{"sent_bytes", 0}, {"plan_bytes", 0}, {"minimum_bytes", 0}, {"ring_bytes", 0}};
  Json traffic = none;
  traffic["largest_rank"] = none;
  return traffic;
}

std::string describe(const Problem& problem, const std::string& instruction_set, int threads) {
  const Pattern& pattern = problem.pattern;
  std::ostringstream out;
  out << "annulus " << version() << " on " << cpu_model() << ", " << instruction_set << ", " << threads
      << (threads == 1 ? " thread\n" : " threads\n");
  out << format_count(problem.tokens) << " tokens, " << problem.heads << " heads";
  if (problem.kv_heads != problem.heads) out << " (" << problem.kv_heads << " for keys and values)";
  out << " of " << problem.head_dim << ", batch " << problem.batch << ", " << name(problem.dtype) << "; segments "
      << joined(of_branches(pattern, &Branch::segment)) << ", dilations "
      << joined(of_branches(pattern, &Branch::dilation)) << ", phase " << name(pattern.phase)
      << (problem.causal ? ", causal" : "");
  if (problem.documents.size() > 2) out << ", " << problem.documents.size() - 1 << " documents";
  out << "\n";
  return out.str();
}

std::string describe_memory(const MemoryLedger& ledger, std::int64_t plan_bytes) {
  return "memory   " + format_bytes(ledger.peak_bytes()) + " in tensors and workspace (plan " +
         format_bytes(plan_bytes) + "), process peak " + format_bytes(process_peak_bytes()) + "\n";
}

std::int64_t plan_bytes(const Attention& attention, bool backward) {
  const std::int64_t forward_bytes = total_bytes(attention.memory(Pass::forward));
  return backward ? std::max(forward_bytes, total_bytes(attention.memory(Pass::backward))) : forward_bytes;
}

std::string number_text(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

std::string duration_text(double seconds) {
  char text[64];
  if (seconds < 1)
    std::snprintf(text, sizeof text, "%.*f ms", seconds < 0.1 ? 2 : 1, seconds * 1e3);
  else
    std::snprintf(text, sizeof text, "%.2f s", seconds);
  return text;
}

std::string table_text(const std::vector<std::vector<std::string>>& rows, std::size_t left) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - width(row[i]), ' ');
      line += (i == 0 ? "" : "  ") + (i < left ? row[i] + padding : padding + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace annulus::cli
