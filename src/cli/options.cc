#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>

#include "kernels/device.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

constexpr int kMaxThreads = 4096;

// Runs `parse` and puts the option's name before whatever it complains about.
template <class Parse>
auto named(const std::string& option, const Parse& parse) {
  try {
    return parse();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(option + ": " + error.what());
  }
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

std::int64_t size_or(const Text& text, const std::string& option, std::int64_t otherwise) {
  return text ? parse_size_option(option, *text) : otherwise;
}

// kv_heads = 0 stands for "as many as heads" in the library; typed, it is a mistake.
std::int64_t typed_kv_heads(const ProblemOptions& options, std::int64_t heads) {
  const std::int64_t kv_heads = size_or(options.kv_heads, "--kv-heads", heads);
  if (kv_heads == 0 && options.kv_heads)
    throw InvalidArgument("--kv-heads must be at least 1; got 0: leave it out for as many as --heads");
  return kv_heads;
}

void apply_head_ranges(const ProblemOptions& options, Pattern& pattern) {
  const auto ranges = named("--head-ranges", [&] { return parse_head_ranges(*options.head_ranges); });
  if (ranges.size() != pattern.branches.size())
    throw InvalidArgument("--head-ranges needs one range a branch; got " + std::to_string(ranges.size()) +
                          " ranges for " + std::to_string(pattern.branches.size()) +
                          " branches: give first:last for each, separated by ';'");
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto [first, last] = ranges[i];
    if (last < first)
      throw InvalidArgument("--head-ranges: a range must not end before it begins; got " + std::to_string(first) + ":" +
                            std::to_string(last) + ": give first:last, last excluded");
    pattern.branches[i].first_head = first;
    pattern.branches[i].head_count = last - first;
  }
}

void apply_classes(const ProblemOptions& options, Pattern& pattern) {
  if (!options.classes)
    throw InvalidArgument(
        "--phase table needs --classes; got none: give one list of classes a branch, such as 0,1;0,0");
  const auto classes = named("--classes", [&] { return parse_classes(*options.classes); });
  if (classes.size() != pattern.branches.size())
    throw InvalidArgument("--classes needs one list a branch; got " + std::to_string(classes.size()) + " lists for " +
                          std::to_string(pattern.branches.size()) + " branches: separate the lists by ';'");
  for (std::size_t i = 0; i < classes.size(); ++i) pattern.branches[i].classes = classes[i];
}

// The fastest type in which the device is no less good: 16-bit products where there are units for them. On the CPU that
// is so for forward alone.
DType best_dtype(const CommandOptions& command) {
  if (uses_gpu(command.machine)) return DType::bf16;
  const std::string best = instruction_sets().front();
  const std::string& wanted = command.machine.instruction_set;
  const bool has_dot = (wanted.empty() || wanted == "auto" ? best : wanted) == "avx512_bf16";
  return has_dot && !command.problem.backward ? DType::bf16 : DType::fp32;
}

Pattern pattern_of(const ProblemOptions& options, std::int64_t heads) {
  const Preset preset = options.preset ? parse_preset(*options.preset) : Preset::longnet;
  if (preset == Preset::head_groups && (options.phase || options.classes || options.head_ranges))
    throw InvalidArgument(
        "--preset head_groups fixes heads and classes of every branch; got --phase, --classes or --head-ranges "
        "beside it: leave them out or choose another preset");
  Pattern pattern =
      make_pattern(preset, parse_sizes_option("--segments", options.segments.value_or(options.defaults.segments)),
                   parse_sizes_option("--dilations", options.dilations.value_or(options.defaults.dilations)), heads);
  if (options.phase) pattern.phase = parse_phase(*options.phase);
  if (options.gradient) pattern.gradient = parse_gradient(*options.gradient);
  if (options.head_ranges) apply_head_ranges(options, pattern);
  if (pattern.phase == Phase::table && preset != Preset::head_groups)
    apply_classes(options, pattern);
  else if (options.classes)
    throw InvalidArgument("--classes is for --phase table alone; got --phase " + std::string(name(pattern.phase)) +
                          ": add --phase table or leave --classes out");
  pattern.pad_like_torchscale = options.pad_like_torchscale;
  return pattern;
}

}  // namespace

CLI::Option* add_text(CLI::App& command, const std::string& flag, Text& value, const std::string& help) {
  return command.add_option_function<std::string>(
      flag, [&value](const std::string& text) { value = text; }, help);
}

void add_report_options(CLI::App& command, ReportOptions& options) {
  command.add_option("--json", options.json, "Write one JSON object to FILE; - for stdout")->type_name("FILE");
  command.add_flag("--quiet", options.quiet, "No progress and no text; errors and --json remain");
}

namespace {

void add_machine_options(CLI::App& command, MachineOptions& options) {
  command.add_option("--device", options.device, "cpu, cuda or cuda:N (default cpu)")
      ->type_name("NAME")
      ->group("Machine");
  command.add_option("--kernel", options.kernel, "With --device cuda: one that `annulus info` lists (default auto)")
      ->type_name("NAME")
      ->group("Machine");
  add_text(command, "--threads", options.threads, "Threads of each rank (default: the usable cores, shared out)")
      ->type_name("N")
      ->group("Machine");
  command
      .add_option("--instruction-set", options.instruction_set,
                  "One that `annulus info` lists (default: the best; verify: all)")
      ->type_name("NAME")
      ->group("Machine");
}

void add_rank_options(CLI::App& command, RankTexts& options) {
  const auto text = [&](const char* flag, Text& value, const std::string& help, const char* type) {
    add_text(command, flag, value, help)->type_name(type)->group("Ranks");
  };
  text("--ranks", options.ranks, "Ranks that share the sequence (default 1; under MPI its processes)", "P");
  text("--transport", options.transport,
       "threads, mpi, tcp, or nccl between GPUs (default: mpi in a job of several processes, tcp by torchrun)", "NAME");
  text("--rendezvous", options.rendezvous,
       "Where processes meet without MPI, tcp:HOST:PORT or file:PATH (default: by torchrun)", "PLACE");
  command.add_option("--launcher", options.launcher, "auto, none, mpirun, srun or torchrun (default auto)")
      ->type_name("NAME")
      ->group("Ranks");
  text("--layout", options.layout, "contiguous, zigzag or striped (default contiguous)", "NAME");
  text("--boundaries", options.boundaries, "Contiguous shards: 0, end of rank 0, ..., tokens (default: even)", "LIST");
  text("--strategy", options.strategy,
       "How keys meet queries: auto, exchange, reshard, ring, gather or replicated (default auto)", "NAME");
  text("--slot-size", options.slot_size, "Bytes that arrive at a time, of two slots (default 32M)", "SIZE");
  text("--memory-limit", options.memory_limit, "Bytes of a rank: smaller slots, or refuse", "SIZE");
  text("--timeout", options.timeout, "Without a sign of life for so long, a rank is lost (default 60)", "SECONDS");
  command.add_option("--trace", options.trace, "Write a Chrome trace of what has run, which Perfetto opens")
      ->type_name("FILE")
      ->group("Ranks");
  command.add_flag("--blocking", options.blocking, "Compute nothing while anything moves, for debugging")
      ->group("Ranks");
}

}  // namespace

void add_options(CLI::App& command, CommandOptions& options, const ProblemDefaults& defaults) {
  ProblemOptions& problem = options.problem;
  problem.defaults = defaults;
  const auto text = [&](const char* flag, Text& value, const std::string& help, const char* type) {
    add_text(command, flag, value, help)->type_name(type)->group("Problem");
  };
  const auto flag = [&](const char* name, bool& value, const char* help) {
    command.add_flag(name, value, help)->group("Problem");
  };
  text("--tokens", problem.tokens, "Tokens of the whole sequence (default " + defaults.tokens + ")", "SIZE");
  text("--batch", problem.batch, "Sequences (default 1)", "SIZE");
  text("--heads", problem.heads, "Query heads (default 12)", "SIZE");
  text("--kv-heads", problem.kv_heads, "Key/value heads, dividing --heads (default: as many)", "SIZE");
  text("--head-dim", problem.head_dim, "Elements of a head (default 64)", "SIZE");
  text("--dtype", problem.dtype, "fp32, bf16, fp16, or auto: what the device does best (default fp32)", "TYPE");
  text("--segments", problem.segments, "Segment length of each branch (default " + defaults.segments + ")", "LIST");
  text("--dilations", problem.dilations, "Dilation of each branch (default " + defaults.dilations + ")", "LIST");
  text("--head-ranges", problem.head_ranges, "Heads of each branch, first:last;... (default: all)", "RANGES");
  text("--preset", problem.preset, "longnet, torchscale, residue or head_groups (default longnet)", "NAME");
  text("--phase", problem.phase, "by_head, by_head_block, every or table (default: the preset's)", "RULE");
  text("--classes", problem.classes, "With --phase table: the class of each head, one list a branch, 0,1;0,0", "LISTS");
  text("--gradient", problem.gradient, "exact or detached (default: the preset's)", "NAME");
  text("--cu-seqlens", problem.cu_seqlens, "Packed documents: 0, end of the first, ..., tokens", "LIST");
  text("--scale", problem.scale, "Factor of the logits (default 1/sqrt(head-dim))", "NUMBER");
  text("--seed", problem.seed, "Of the inputs that are drawn (default 0)", "NUMBER");
  flag("--pad-like-torchscale", problem.pad_like_torchscale,
       "Zero keys in a short last segment, as torchscale has them");
  flag("--causal", problem.causal, "A query sees itself and the keys before it");
  flag("--backward", problem.backward, "Gradients too");
  flag("--deterministic", problem.deterministic, "The same bits run after run (on one CPU rank always so)");
  flag("--reproducible", problem.reproducible, "The same bits for every number of ranks that have this, one included");
  add_machine_options(command, options.machine);
  add_rank_options(command, options.ranks);
  add_report_options(command, options.report);
}

std::int64_t parse_size_option(const std::string& option, const std::string& text) {
  return named(option, [&] { return parse_size(text); });
}

std::vector<std::int64_t> parse_sizes_option(const std::string& option, const std::string& text) {
  return named(option, [&] { return parse_sizes(text); });
}

double parse_number_option(const std::string& option, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    throw InvalidArgument(option + " must be a finite number; got '" + text + "': write it as in 0.125");
  return value;
}

Sizes typed_sizes(const CommandOptions& command) {
  const ProblemOptions& options = command.problem;
  Sizes sizes;
  sizes.batch = size_or(options.batch, "--batch", 1);
  sizes.tokens = parse_size_option("--tokens", options.tokens.value_or(options.defaults.tokens));
  sizes.heads = size_or(options.heads, "--heads", 12);
  sizes.kv_heads = typed_kv_heads(options, sizes.heads);
  sizes.head_dim = size_or(options.head_dim, "--head-dim", 64);
  const std::string dtype = options.dtype.value_or("fp32");
  sizes.dtype = dtype == kAutoDType ? best_dtype(command) : parse_dtype(dtype);
  return sizes;
}

void check_typed_sizes(const ProblemOptions& options, const Sizes& sizes, const std::string& source) {
  const auto check = [&](const char* option, const Text& typed, std::int64_t found) {
    if (!typed) return;
    const std::int64_t wanted = parse_size_option(option, *typed);
    if (wanted != found)
      throw InvalidArgument(std::string(option) + " must agree with " + source + "; got " + std::to_string(wanted) +
                            ", but " + source + " has " + std::to_string(found) +
                            ": leave the option out or give another file");
  };
  check("--batch", options.batch, sizes.batch);
  check("--tokens", options.tokens, sizes.tokens);
  check("--heads", options.heads, sizes.heads);
  check("--kv-heads", options.kv_heads, sizes.kv_heads);
  check("--head-dim", options.head_dim, sizes.head_dim);
}

Problem make_problem(const ProblemOptions& options, const Sizes& sizes) {
  Problem problem;
  problem.batch = sizes.batch;
  problem.tokens = sizes.tokens;
  problem.heads = sizes.heads;
  problem.kv_heads = sizes.kv_heads;
  problem.head_dim = sizes.head_dim;
  problem.dtype = sizes.dtype;
  problem.causal = options.causal;
  problem.pattern = pattern_of(options, sizes.heads);
  if (options.scale) problem.scale = parse_number_option("--scale", *options.scale);
  if (options.cu_seqlens) problem.documents = parse_sizes_option("--cu-seqlens", *options.cu_seqlens);
  return resolve(std::move(problem));
}

Options make_machine(const MachineOptions& options) {
  Options machine;
  machine.instruction_set = options.instruction_set.empty() ? "auto" : options.instruction_set;
  if (uses_gpu(options)) {
    machine.device = options.device;
    machine.instruction_set = options.kernel;
  } else if (options.kernel != "auto") {
    throw InvalidArgument("--kernel is one of a GPU's; got " + options.kernel + " with --device " + options.device +
                          ": leave it out, or choose an --instruction-set of the CPU");
  }
  if (options.threads) {
    const std::int64_t threads = parse_size_option("--threads", *options.threads);
    if (threads < 1 || threads > kMaxThreads)
      throw InvalidArgument("--threads must lie in [1, " + std::to_string(kMaxThreads) + "]; got " + *options.threads +
                            ": leave it out for all usable cores");
    machine.threads = static_cast<int>(threads);
  }
  return machine;
}

bool uses_gpu(const MachineOptions& options) {
  return named("--device", [&] { return parse_device(options.device).is_gpu; });
}

std::uint64_t make_seed(const ProblemOptions& options) {
  if (!options.seed) return 0;
  const std::string& text = *options.seed;
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size())
    throw InvalidArgument("--seed must be a whole number in [0, 2^64); got '" + text + "': write it in decimal digits");
  return seed;
}

std::vector<std::pair<std::int64_t, std::int64_t>> parse_head_ranges(const std::string& text) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const std::string& part : split(text, ';')) {
    const std::vector<std::string> ends = split(part, ':');
    if (ends.size() != 2)
      throw InvalidArgument("a range of heads is first:last; got '" + part + "': write it as in 0:6, last excluded");
    ranges.emplace_back(parse_size(ends[0]), parse_size(ends[1]));
  }
  return ranges;
}

std::vector<std::vector<std::int64_t>> parse_classes(const std::string& text) {
  std::vector<std::vector<std::int64_t>> lists;
  for (const std::string& part : split(text, ';')) {
    if (part.empty())
      lists.emplace_back();  // a branch without heads
    else
      lists.push_back(parse_sizes(part));
  }
  return lists;
}

}  // namespace annulus::cli
