// Who sends to whom, as a picture: senders down, receivers across, darker for more bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus::cli {

struct SentBy {
  int rank = 0;
  std::vector<std::int64_t> bytes;  // to each rank
};

// Where there are more receivers than columns, a column stands for several ranks.
std::string matrix_picture(const std::vector<SentBy>& senders);

}  // namespace annulus::cli
