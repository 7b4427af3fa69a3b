// The options that every command shares, from text to a Problem.
//
// CLI11 only collects what was typed; all meaning is given here, so that a wrong value is refused with the same words
// wherever it comes from. What was not typed stays empty: `run` must know the difference when a file says otherwise.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "annulus/attention.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace annulus::cli {

using Text = std::optional<std::string>;

// What a command assumes when nothing is typed.
struct ProblemDefaults {
  std::string tokens;
  std::string segments;
  std::string dilations;
};

inline constexpr const char* kAutoDType = "auto";  // of --dtype

struct ProblemOptions {
  Text tokens, batch, heads, kv_heads, head_dim, dtype;
  Text segments, dilations, head_ranges, preset, phase, classes, gradient, cu_seqlens, scale, seed;
  bool pad_like_torchscale = false;
  bool causal = false;
  bool backward = false;
  bool deterministic = false;
  bool reproducible = false;
  ProblemDefaults defaults;
};

struct MachineOptions {
  std::string device = "cpu";
  std::string instruction_set = "auto";
  std::string kernel = "auto";  // on a GPU
  Text threads;
};

// Ranks, their shards, and how they speak to each other; rank_setup.h gives them meaning.
struct RankTexts {
  Text ranks, transport, rendezvous, layout, boundaries, strategy, slot_size, memory_limit, timeout;
  std::string launcher = "auto";
  std::string trace;  // a path; empty: none
  bool blocking = false;
};

struct ReportOptions {
  std::string json;  // a path, "-" for stdout, empty: none
  bool quiet = false;
};

struct CommandOptions {
  ProblemOptions problem;
  MachineOptions machine;
  RankTexts ranks;
  ReportOptions report;
};

// An option that keeps its text, empty or not. (How CLI11 fills a std::optional from an empty text depends on its
// version.)
CLI::Option* add_text(CLI::App& command, const std::string& flag, Text& value, const std::string& help);

void add_options(CLI::App& command, CommandOptions& options, const ProblemDefaults& defaults);
void add_report_options(CLI::App& command, ReportOptions& options);

// The sizes of the tensors: typed, by default, or from a file.
struct Sizes {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  DType dtype = DType::fp32;
};

// All from the command line and the defaults. `--dtype auto` depends on the machine.
Sizes typed_sizes(const CommandOptions& options);

// Throws InvalidArgument with both values where an explicit option contradicts `sizes`, which `source` gives.
void check_typed_sizes(const ProblemOptions& options, const Sizes& sizes, const std::string& source);

// Resolved.
Problem make_problem(const ProblemOptions& options, const Sizes& sizes);

Options make_machine(const MachineOptions& options);
bool uses_gpu(const MachineOptions& options);
std::uint64_t make_seed(const ProblemOptions& options);

// A size such as 64k; the message of what goes wrong names the option.
std::int64_t parse_size_option(const std::string& option, const std::string& text);
std::vector<std::int64_t> parse_sizes_option(const std::string& option, const std::string& text);
double parse_number_option(const std::string& option, const std::string& text);

// "0:6;6:12" and "0,1;0,0", one entry a branch.
std::vector<std::pair<std::int64_t, std::int64_t>> parse_head_ranges(const std::string& text);
std::vector<std::vector<std::int64_t>> parse_classes(const std::string& text);

}  // namespace annulus::cli
