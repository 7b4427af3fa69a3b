#include "cli/files.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "cli/collection.h"
#include "io/atomic_file.h"

namespace annulus::cli {
namespace {

namespace fs = std::filesystem;

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

Pass pass_of(const ProblemOptions& typed) { return typed.backward ? Pass::backward : Pass::forward; }

// What a header says of the whole tensor. Its bytes are spread over the ranks: here they are only counted.
FileTensor file_tensor(const Workload& work, const std::string& name, bool without_batch) {
  FileTensor tensor;
  tensor.name = name;
  tensor.type = element_type(work.dtype(name));
  tensor.shape = work.whole_shape(name);
  if (without_batch) tensor.shape.erase(tensor.shape.begin());
  tensor.bytes = {static_cast<const std::byte*>(work.data(name)),
                  static_cast<std::size_t>(dense_bytes(tensor.shape, tensor.type).value())};
  return tensor;
}

// Every output as (tensor, path); the tensor is empty for a file that holds them all.
std::vector<std::pair<std::string, std::string>> output_paths(const FileOptions& files) {
  std::vector<std::pair<std::string, std::string>> paths(files.out.begin(), files.out.end());
  if (!files.output.empty()) paths.emplace_back("", files.output);
  return paths;
}

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code ignored;
  return fs::equivalent(a, b, ignored) || fs::weakly_canonical(a, ignored) == fs::weakly_canonical(b, ignored);
}

}  // namespace

void add_file_options(CLI::App& command, FileOptions& options) {
  const auto path = [&](const std::string& flag, auto set, const std::string& help) {
    command.add_option_function<std::string>(flag, set, help)->type_name("FILE")->group("Files");
  };
  path(
      "--input", [&](const std::string& text) { options.input = text; },
      "safetensors with q, k, v and, with --backward, dout");
  for (const std::string& name : input_names(Pass::backward))
    path(
        "--" + name, [&options, name](const std::string& text) { options.in[name] = text; },
        name + " as .npy, instead of --input");
  path(
      "--output", [&](const std::string& text) { options.output = text; },
      "safetensors for out, lse and, with --backward, dq, dk, dv");
  for (const std::string& name : result_names(Pass::backward))
    path(
        "--" + name, [&options, name](const std::string& text) { options.out[name] = text; }, name + " as .npy");
}

InputFiles::InputFiles(const FileOptions& files, const ProblemOptions& typed) {
  if (!files.input.empty() && !files.in.empty())
    throw InvalidArgument("inputs come from one kind of file; got --input and --" + files.in.begin()->first +
                          ": give --input for safetensors, or --q, --k, --v for npy");
  if (!files.input.empty()) open_safetensors(files.input, pass_of(typed));
  if (!files.in.empty()) open_npy(files.in, pass_of(typed));
  if (given()) take_sizes(typed);
}

void InputFiles::open_safetensors(const std::string& path, Pass pass) {
  safetensors_.emplace_back(path);
  for (const std::string& name : input_names(pass)) {
    if (name == "dout" && safetensors_.back().find(name) == nullptr)
      throw InvalidArgument("--backward needs the gradient of the output, tensor dout; got " + path +
                            " without it: add the tensor or leave --backward out");
    tensors_.push_back({name, name + " in " + path, safetensors_.back().at(name)});
  }
}

void InputFiles::open_npy(const std::map<std::string, std::string>& paths, Pass pass) {
  for (const auto& [name, path] : paths)
    if (!contains(input_names(pass), name))
      throw InvalidArgument("--" + name + " belongs to --backward; got it without: add --backward or leave --" + name +
                            " out");
  for (const std::string& name : input_names(pass)) {
    const auto path = paths.find(name);
    if (path == paths.end())
      throw InvalidArgument("npy inputs are " +
                            std::string(pass == Pass::forward ? "--q, --k and --v" : "--q, --k, --v and --dout") +
                            " together; got no --" + name + ": give all of them or none");
    npy_.emplace_back(path->second);
    tensors_.push_back({name, name + " in " + path->second, npy_.back().tensor()});
  }
}

const InputFiles::Entry& InputFiles::entry(const std::string& name) const {
  return *std::ranges::find(tensors_, name, &Entry::name);
}

// The problem is what q and k say; everything else must agree with them.
void InputFiles::take_sizes(const ProblemOptions& typed) {
  const auto shape_of = [&](const Entry& entry) {
    std::vector<std::int64_t> shape = entry.tensor.shape;
    if (shape.size() != (without_batch_ ? 3 : 4))
      throw InvalidArgument(
          entry.source +
          " must have the shape [batch, tokens, heads, head_dim], or like q [tokens, heads, head_dim]; "
          "received " +
          shape_text(shape) + "; reshape the tensor");
    if (without_batch_) shape.insert(shape.begin(), 1);
    return shape;
  };
  const Entry& q = entry("q");
  const Entry& k = entry("k");
  without_batch_ = q.tensor.shape.size() == 3;
  const std::vector<std::int64_t> q_shape = shape_of(q);
  sizes_ = {q_shape[0], q_shape[1], q_shape[2], shape_of(k)[2], q_shape[3], DType::fp32};
  sizes_.dtype = dtype_of(
      q.tensor, typed.dtype && *typed.dtype != kAutoDType ? std::optional(parse_dtype(*typed.dtype)) : std::nullopt);
  for (const Entry& other : tensors_) {
    (void)dtype_of(other.tensor, sizes_.dtype);
    const bool key_side = other.name == "k" || other.name == "v";
    std::vector<std::int64_t> wanted = q_shape;
    if (key_side) wanted[2] = sizes_.kv_heads;
    if (shape_of(other) != wanted)
      throw InvalidArgument(other.source + " must have the shape " + shape_text(wanted) + " to fit " +
                            (key_side ? k.source : q.source) + "; received " + shape_text(other.tensor.shape) +
                            "; give tensors of one problem");
  }
  if (sizes_.kv_heads == 0)
    throw InvalidArgument(k.source + " must have at least one head; received " + shape_text(k.tensor.shape) +
                          "; add the heads");
  check_typed_sizes(typed, sizes_, safetensors_.empty() ? "the npy files" : q.source.substr(q.source.find("in ") + 3));
}

void InputFiles::lend(Workload& work, Pass pass) {
  for (const std::string& name : input_names(pass)) {
    if (work.has(name)) continue;
    if (!work.shard(name).is_whole()) {
      work.copy(name, entry(name).tensor.bytes);
      continue;
    }
    const std::lock_guard lock(mutex_);
    elements_.emplace_back(entry(name).tensor);
    work.borrow(name, elements_.back().data());
  }
}

std::int64_t InputFiles::lent_bytes(const Workload& work, Pass pass) const {
  std::int64_t bytes = 0;
  if (!given()) return bytes;
  for (const std::string& name : input_names(pass))
    if (work.shard(name).is_whole()) bytes += work.bytes(name);
  return bytes;
}

void check_outputs(const FileOptions& files, const std::vector<std::string>& others, Pass pass) {
  std::vector<std::string> inputs;
  if (!files.input.empty()) inputs.push_back(files.input);
  for (const auto& [name, path] : files.in) inputs.push_back(path);
  std::vector<std::pair<std::string, std::string>> outputs = output_paths(files);
  for (const std::string& path : others) outputs.emplace_back("", path);
  std::vector<std::string> before;
  for (const auto& [name, path] : outputs) {
    if (!name.empty() && !contains(result_names(pass), name))
      throw InvalidArgument("--" + name + " is a result of --backward; got it without: add --backward or leave --" +
                            name + " out");
    for (const std::string& input : inputs)
      if (same_file(path, input))
        throw InvalidArgument("an output must not overlap an input; got " + path +
                              " as both: choose another name for the output");
    for (const std::string& other : before)
      if (same_file(path, other))
        throw InvalidArgument("outputs must be different files; got " + path + " twice: choose another name");
    before.push_back(path);
    AtomicFile probe(path);  // not committed: leaves nothing behind
  }
}

std::vector<std::string> write_outputs(const FileOptions& files, Rank& rank, const Holdings& holdings,
                                       const Workload& work, Pass pass, bool without_batch) {
  // All files are complete before the first one appears under its name.
  std::vector<std::string> paths;
  std::vector<std::unique_ptr<AtomicFile>> written;  // on rank 0
  const auto open = [&](const std::string& path, const std::string& header) {
    paths.push_back(path);
    if (!rank.reports()) return;
    written.push_back(std::make_unique<AtomicFile>(path));
    written.back()->write(header);
  };
  const auto append = [&](const std::string& name) {
    const RowShape shape = work.row_shape(name);
    const LocalRows rows{static_cast<const std::byte*>(work.data(name)), shape.outer,
                         shape.inner * size_of(work.dtype(name))};
    collect(rank.transport, holdings.owned(is_key_side(name)), rows,
            [&](std::span<const std::byte> bytes) { written.back()->write(bytes); });
  };
  for (const auto& [name, path] : files.out) {
    open(path, npy_header(file_tensor(work, name, without_batch), path));
    append(name);
  }
  if (!files.output.empty()) {
    std::vector<FileTensor> tensors;
    for (const std::string& name : result_names(pass)) tensors.push_back(file_tensor(work, name, without_batch));
    const SafetensorsLayout layout = lay_out_safetensors(tensors, {}, files.output);
    open(files.output, layout.header);
    for (const std::size_t index : layout.order) append(tensors[index].name);
  }
  rank.busy([&] {
    for (const auto& file : written) file->commit();
  });
  return paths;
}

}  // namespace annulus::cli
