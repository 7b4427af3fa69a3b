// What a command has to say: text for people on stdout, one JSON object for machines (docs/command-line.md lists its
// keys).
#pragma once

#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "cli/options.h"
#include "cli/workload.h"

namespace annulus::cli {

using Json = nlohmann::ordered_json;

// stdout, or nowhere when quiet or when stdout belongs to the JSON object.
std::ostream& text_output(const ReportOptions& options);

// Throws InvalidArgument when the file cannot be created: before the work, not after it.
void check_report(const ReportOptions& options);
void write_report(const ReportOptions& options, const Json& object);

// All options as resolved.
Json problem_json(const CommandOptions& options, const Problem& problem);
Json environment_json(const std::string& instruction_set, int threads);
// The ledger against the plan of the larger pass. Per rank; there is one.
Json memory_json(const MemoryLedger& ledger, std::int64_t plan_bytes);
// Nothing travels on one rank.
Json traffic_json();

// Two lines: the machine and the problem.
std::string describe(const Problem& problem, const std::string& instruction_set, int threads);
std::string describe_memory(const MemoryLedger& ledger, std::int64_t plan_bytes);

// The bytes of the larger pass.
std::int64_t plan_bytes(const Attention& attention, bool backward);

// "12.3 ms", "1.50 s"
std::string duration_text(double seconds);
// With `digits` significant ones.
std::string number_text(double value, int digits = 3);

// Columns padded to their widest cell; the first `left` of them are left-aligned, the others right-aligned.
std::string table_text(const std::vector<std::vector<std::string>>& rows, std::size_t left = 1);

}  // namespace annulus::cli
