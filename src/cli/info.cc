// annulus info: what this build and this machine can do.
#include <iostream>

#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/environment.h"
#include "cli/report.h"
#include "kernels/cpu/tiles.h"
#include "kernels/thread_pool.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

Json caches_json() {
  Json list = Json::array();
  for (const Cache& cache : caches())
    list.push_back({{"level", cache.level}, {"type", cache.type}, {"bytes", cache.bytes}});
  return list;
}

Json info_json(const std::string& chosen) {
  Json object = {{"environment", environment_json(chosen, usable_cores())},
                 {"cores", usable_cores()},
                 {"instruction_sets", instruction_sets()},
                 {"dtypes", {name(DType::fp32), name(DType::bf16), name(DType::fp16)}},
                 {"head_dim", {{"least", 1}, {"most", cpu::kMaxHeadDim}}},
                 {"devices", {"cpu"}},
                 {"gpu", cuda_json()},
                 {"caches", caches_json()}};
  if (!object["gpu"].is_null()) object["devices"].push_back("cuda");
  object["available_memory_bytes"] = available_memory_bytes() ? Json(*available_memory_bytes()) : Json(nullptr);
  return object;
}

void print_info(std::ostream& out, const std::string& chosen) {
  out << "annulus " << version() << "\n";
  out << "cpu               " << cpu_model() << "\n";
  out << "cores             " << usable_cores() << " usable\n";
  out << "instruction sets ";
  for (const std::string& set : instruction_sets()) out << " " << set << (set == chosen ? " (chosen)" : "");
  out << "\ntypes             fp32 bf16 fp16\n";
  out << "head sizes        1 to " << cpu::kMaxHeadDim << "\n";
  out << "caches           ";
  for (const Cache& cache : caches())
    out << " L" << cache.level << " " << cache.type << " " << format_bytes(cache.bytes) << ";";
  out << "\nmemory            "
      << (available_memory_bytes() ? format_bytes(*available_memory_bytes()) + " available" : "unknown") << "\n"
      << cuda_text();
}

}  // namespace

Command add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Show what this build and this machine can do");
  auto options = std::make_shared<ReportOptions>();
  add_report_options(*command, *options);
  return {command, [options] {
            check_report(*options);
            const std::string chosen = instruction_sets().front();
            print_info(text_output(*options), chosen);
            write_report(*options, info_json(chosen));
            return kRight;
          }};
}

}  // namespace annulus::cli
