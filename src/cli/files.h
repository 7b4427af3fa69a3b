// Tensors from and to files, for `run`: one safetensors file with tensors by name, or an npy file each.
//
// A file holds [batch, tokens, heads, head_dim], or [tokens, heads, head_dim] for a batch of 1; results then have no
// batch either. The shapes of q and k and the type of q are the problem's; every other tensor must fit them.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "cli/group.h"
#include "cli/options.h"
#include "cli/workload.h"
#include "io/npy.h"
#include "io/safetensors.h"

namespace annulus::cli {

struct FileOptions {
  std::string input;                      // safetensors; empty: none
  std::map<std::string, std::string> in;  // npy by tensor
  std::string output;
  std::map<std::string, std::string> out;
};

void add_file_options(CLI::App& command, FileOptions& options);

// Input files, mapped. Nothing is read beyond the headers until the tensors are used.
class InputFiles {
 public:
  // Throws InvalidArgument for wrong combinations of options, files that are missing or broken, shapes that do not fit.
  InputFiles(const FileOptions& files, const ProblemOptions& typed);

  bool given() const { return !tensors_.empty(); }
  const Sizes& sizes() const { return sizes_; }
  bool without_batch() const { return without_batch_; }

  // The inputs of the pass that the workload has not got yet: lent where it has all rows, else its own rows copied.
  // Several ranks may ask at the same time.
  void lend(Workload& work, Pass pass);
  // Bytes of the workload's inputs that are lent, not copied.
  std::int64_t lent_bytes(const Workload& work, Pass pass) const;

 private:
  struct Entry {
    std::string name;    // ours: q, k, v, dout
    std::string source;  // for messages: "q in x.safetensors"
    FileTensor tensor;
  };

  void open_safetensors(const std::string& path, Pass pass);
  void open_npy(const std::map<std::string, std::string>& paths, Pass pass);
  void take_sizes(const ProblemOptions& typed);
  const Entry& entry(const std::string& name) const;

  std::vector<SafetensorsFile> safetensors_;
  std::vector<NpyFile> npy_;
  std::mutex mutex_;
  std::vector<AlignedElements> elements_;
  std::vector<Entry> tensors_;
  Sizes sizes_;
  bool without_batch_ = false;
};

// Throws InvalidArgument when an output would replace an input or another output, belongs to a pass that is not run, or
// cannot be created: better before an hour of work than after it. `others` are further files to be written.
void check_outputs(const FileOptions& files, const std::vector<std::string>& others, Pass pass);

// Rank 0 writes the files, in global order, whatever shards the rows come from; it returns the paths. A collective.
std::vector<std::string> write_outputs(const FileOptions& files, Rank& rank, const Holdings& holdings,
                                       const Workload& work, Pass pass, bool without_batch);

}  // namespace annulus::cli
