// annulus info: what this build and this machine can do.
#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

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

std::vector<std::string> transports() {
  std::vector<std::string> names = {"threads"};
  if (built_with_mpi()) names.emplace_back("mpi");
  names.emplace_back("tcp");
  if (has_nccl()) names.emplace_back("nccl");
  return names;
}

Json info_json(const std::string& chosen, const Launcher& launcher) {
  Launch launch;
  launch.launcher = launcher;
  launch.ranks = launcher.processes;
  launch.transport = usual_transport(launcher);
  if (launch.transport == "mpi" && !built_with_mpi()) launch.transport = "threads";
  Json object = {{"environment", environment_json(chosen, usable_cores(), launch)},
                 {"cores", usable_cores()},
                 {"instruction_sets", instruction_sets()},
                 {"dtypes", {name(DType::fp32), name(DType::bf16), name(DType::fp16)}},
                 {"head_dim", {{"least", 1}, {"most", cpu::kMaxHeadDim}}},
                 {"devices", {"cpu"}},
                 {"transports", transports()},
                 {"gpu", cuda_json()},
                 {"caches", caches_json()}};
  if (!object["gpu"].is_null()) object["devices"].push_back("cuda");
  object["available_memory_bytes"] = available_memory_bytes() ? Json(*available_memory_bytes()) : Json(nullptr);
  return object;
}

void print_info(std::ostream& out, const std::string& chosen, const Launcher& launcher) {
  out << "annulus " << version() << "\n";
  out << "cpu               " << cpu_model() << "\n";
  out << "cores             " << usable_cores() << " usable\n";
  out << "instruction sets ";
  for (const std::string& set : instruction_sets()) out << " " << set << (set == chosen ? " (chosen)" : "");
  out << "\ntypes             fp32 bf16 fp16\n";
  out << "head sizes        1 to " << cpu::kMaxHeadDim << "\n";
  out << "transports       ";
  for (const std::string& transport : transports()) out << " " << transport;
  out << "\nlauncher          " << launcher.name << ", " << launcher.processes
      << (launcher.processes == 1 ? " process\n" : " processes\n");
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
  auto options = std::make_shared<CommandOptions>();
  add_report_options(*command, options->report);
  return {command, [options] {
            check_reports(report_paths(*options));
            const std::string chosen = instruction_sets().front();
            const Launcher launcher = detect_launcher(process_environment);
            if (launcher.process > 0) return kRight;  // one process speaks for the job
            print_info(text_output(options->report), chosen, launcher);
            write_report(options->report, info_json(chosen, launcher));
            return kRight;
          }};
}

}  // namespace annulus::cli
