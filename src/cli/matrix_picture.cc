#include "cli/matrix_picture.h"

#include <algorithm>

#include "numeric/size.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kColumns = 32;

// Nothing, a dot for a little, then four shades.
std::string shade(std::int64_t bytes, std::int64_t most) {
  if (bytes == 0) return "  ";
  static const char* const kShades[] = {"··", "░░", "▒▒", "▓▓", "██"};
  const double fraction = static_cast<double>(bytes) / static_cast<double>(most);
  return kShades[std::min(4, static_cast<int>(fraction * 5))];
}

}  // namespace

std::string matrix_picture(const std::vector<SentBy>& senders) {
  if (senders.empty()) return "";
  const auto ranks = static_cast<std::int64_t>(senders.front().bytes.size());
  const std::int64_t columns = std::min(ranks, kColumns);
  std::vector<std::vector<std::int64_t>> cells;
  std::int64_t most = 0;
  for (const SentBy& sender : senders) {
    std::vector<std::int64_t>& row = cells.emplace_back(static_cast<std::size_t>(columns), 0);
    for (std::int64_t to = 0; to < ranks; ++to)
      row[static_cast<std::size_t>(to * columns / ranks)] += sender.bytes[static_cast<std::size_t>(to)];
    most = std::max(most, *std::ranges::max_element(row));
  }
  if (most == 0) return "nobody sends anything\n";
  const std::size_t width = std::to_string(senders.back().rank).size();
  std::string text = "who sends to whom: from rank (down) to ranks 0 to " + std::to_string(ranks - 1) + " (across" +
                     (columns < ranks ? ", several a column" : "") + "), ██ is up to " + format_bytes(most) + "\n";
  for (std::size_t i = 0; i < senders.size(); ++i) {
    const std::string rank = std::to_string(senders[i].rank);
    text += "  " + std::string(width - rank.size(), ' ') + rank + " │";
    for (const std::int64_t bytes : cells[i]) text += shade(bytes, most);
    text += "│\n";
  }
  return text;
}

}  // namespace annulus::cli
