#include "cli/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
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

std::vector<std::string> report_paths(const CommandOptions& options) {
  std::vector<std::string> paths;
  if (!options.report.json.empty() && options.report.json != "-") paths.push_back(options.report.json);
  if (!options.ranks.trace.empty()) paths.push_back(options.ranks.trace);
  return paths;
}

void check_reports(const std::vector<std::string>& paths) {
  for (std::size_t i = 0; i < paths.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j)
      if (paths[i] == paths[j])
        throw InvalidArgument("outputs must be different files; got " + paths[i] + " twice: choose another name");
    const AtomicFile probe(paths[i]);  // not committed: leaves nothing behind
  }
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

Json problem_json(const CommandOptions& options, const Problem& problem, int ranks) {
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
          {"reproducible", options.problem.reproducible || (ranks == 1 && problem.dtype == DType::fp32)}};
}

Json environment_json(const std::string& instruction_set, int threads, const Launch& launch) {
  return {{"version", version()},
          {"command", command_line()},
          {"device", "cpu"},
          {"cpu", cpu_model()},
          {"instruction_set", instruction_set},
          {"launcher", launch.launcher.name},
          {"transport", launch.transport.empty() ? "threads" : launch.transport},
          {"ranks", launch.ranks},
          {"threads", threads}};
}

Json ranks_json(const RankSetup& setup, const Launch& launch, std::int64_t slot_bytes) {
  Json json = {{"ranks", launch.ranks},
               {"layout", name(setup.sharding.layout)},
               {"strategy", strategy_text(setup)},
               {"slot_bytes", slot_bytes}};
  json["boundaries"] = setup.sharding.boundaries;
  json["memory_limit_bytes"] = setup.memory_limit ? Json(*setup.memory_limit) : Json(nullptr);
  return json;
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

std::int64_t plan_bytes(const RankAttention& attention, bool backward) {
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
