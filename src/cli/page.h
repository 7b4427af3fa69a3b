// A page for people, made of the JSON objects that the other commands write: what was asked for, whether it is right,
// how fast it was, what it took and what travelled. One HTML file with its pictures inside, and nothing to load.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/report.h"

namespace annulus::cli {

struct NamedReport {
  std::string name;  // of the file
  Json object;
};

// The command that wrote the object, by its keys: "info", "plan", "run", "verify" or "bench"; "" for none of them.
std::string command_of(const Json& object);

// Takes objects that have a command. Draws what it finds in them and leaves out what it does not.
std::string draw_page(const std::string& title, const std::vector<NamedReport>& reports);

}  // namespace annulus::cli
