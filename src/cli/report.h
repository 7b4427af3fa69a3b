// What a command has to say: text for people on stdout, one JSON object for machines (docs/command-line.md lists its
// keys).
#pragma once

#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "cli/launcher.h"
#include "cli/options.h"
#include "cli/rank_setup.h"
#include "cli/workload.h"

namespace annulus::cli {

using Json = nlohmann::ordered_json;

// stdout, or nowhere when quiet or when stdout belongs to the JSON object.
std::ostream& text_output(const ReportOptions& options);

// The files that every command may write: --json and --trace.
std::vector<std::string> report_paths(const CommandOptions& options);
// Throws InvalidArgument when one cannot be created, or is given twice: before the work, not after it.
void check_reports(const std::vector<std::string>& paths);
void write_report(const ReportOptions& options, const Json& object);

// All options as resolved.
Json problem_json(const CommandOptions& options, const Problem& problem, int ranks);
Json environment_json(const std::string& instruction_set, int threads, const Launch& launch = {});
Json ranks_json(const RankSetup& setup, const Launch& launch, std::int64_t slot_bytes);

// Two lines: the machine and the problem.
std::string describe(const Problem& problem, const std::string& instruction_set, int threads);

// The bytes of the larger pass.
std::int64_t plan_bytes(const RankAttention& attention, bool backward);

// "12.3 ms", "1.50 s"
std::string duration_text(double seconds);
// With `digits` significant ones.
std::string number_text(double value, int digits = 3);

// Columns padded to their widest cell; the first `left` of them are left-aligned, the others right-aligned.
std::string table_text(const std::vector<std::vector<std::string>>& rows, std::size_t left = 1);

}  // namespace annulus::cli
