#include "cli/measurement.h"

#include "cli/report.h"

namespace annulus::cli {

double Measurement::median() const {
  const std::size_t middle = seconds.size() / 2;
  return seconds.size() % 2 == 1 ? seconds[middle] : (seconds[middle - 1] + seconds[middle]) / 2;
}

void check_plausible(const Measurement& measurement, const Peak& peak) {
  const double rate = measurement.rate(measurement.best());
  if (rate <= peak.flop_per_s) return;
  throw AbovePeak("no pass can be faster than the peak of its cores; " + measurement.pass + " came out at " +
                  number_text(rate / 1e9) + " GFLOP/s, the peak (" + peak.instruction + ") at " +
                  number_text(peak.flop_per_s / 1e9) +
                  ": one of them is wrong, so nothing is reported; repeat on an idle machine, with more --repeats");
}

}  // namespace annulus::cli
