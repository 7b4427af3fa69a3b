#include "cli/workload.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "cli/random.h"
#include "kernels/device.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kAlignment = 64;

template <class Call>
double seconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Stream stream_of(const std::string& name) {
  if (name == "q") return Stream::q;
  if (name == "k") return Stream::k;
  if (name == "v") return Stream::v;
  return Stream::dout;
}

}  // namespace

void Buffer::Free::operator()(std::byte* data) const { std::free(data); }

Buffer::Buffer(std::int64_t bytes) {
  const std::int64_t rounded = (std::max<std::int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<std::size_t>(rounded))));
  if (data_ == nullptr)
    throw OutOfMemory("a tensor must fit into memory; the system refused " + format_bytes(rounded) +
                      ": give smaller sizes or raise the limit of this process");
}

std::vector<std::string> input_names(Pass pass) {
  if (pass == Pass::forward) return {"q", "k", "v"};
  return {"q", "k", "v", "dout"};
}

std::vector<std::string> result_names(Pass pass) {
  if (pass == Pass::forward) return {"out", "lse"};
  return {"out", "lse", "dq", "dk", "dv"};
}

bool is_key_side(const std::string& name) { return name == "k" || name == "v" || name == "dk" || name == "dv"; }

bool is_tensor(const std::string& name) {
  for (const auto& names : {input_names(Pass::backward), result_names(Pass::backward)})
    if (std::ranges::find(names, name) != names.end()) return true;
  return false;
}

Workload::Workload(const Problem& problem, Holding holding) : problem_(problem), holding_(std::move(holding)) {}

const ShardMap& Workload::shard(const std::string& name) const {
  return is_key_side(name) ? holding_.keys : holding_.queries;
}

void Workload::draw(std::uint64_t seed, int threads, Pass pass) {
  release_workspace();
  for (const std::string& name : input_names(pass)) {
    if (has(name)) continue;
    allocate(name);
    fill_normal(seed, stream_of(name), problem_.dtype, tensors_.at(name).own.data(), shard(name), row_shape(name),
                threads);
  }
}

void Workload::borrow(const std::string& name, const void* data) {
  release_workspace();
  ledger_.allocate(name, bytes(name));
  tensors_[name].data = data;
  tensors_[name].on_device.reset();
}

void Workload::copy(const std::string& name, std::span<const std::byte> whole) {
  release_workspace();
  allocate(name);
  const auto row_bytes = static_cast<std::size_t>(row_shape(name).inner * size_of(dtype(name)));
  std::byte* rows = tensors_.at(name).own.data();
  const ShardMap& own = shard(name);
  own.for_each_row(0, row_shape(name).outer * own.rows(), [&](std::int64_t here, std::int64_t there) {
    std::memcpy(rows + static_cast<std::size_t>(here) * row_bytes,
                whole.data() + static_cast<std::size_t>(there) * row_bytes, row_bytes);
  });
}

void Workload::hold_results(Pass pass) {
  for (const std::string& name : result_names(pass))
    if (!has(name)) allocate(name);
}

void Workload::compute_on(const std::string& device, Transport& transport) {
  if (!parse_device(device).is_gpu) return;
  transport_ = &transport;
  gpu_ = &cuda::load_backend();
  gpu_index_ = cuda::device_index(device);
}

template <class Call>
double Workload::timed(const Call& call) const {
  if (gpu_ == nullptr) return seconds_of([&] { call(nullptr); });
  // By the wall clock, until the GPU is done: where ranks share one, the moment at which its own clock starts for a
  // rank may come after the work of others.
  return seconds_of([&] { (void)gpu_->time(gpu_index_, call, [&] { transport_->poll(); }); });
}

double Workload::forward(const RankAttention& attention) {
  prepare(attention, Pass::forward);
  ForwardArgs args;
  args.q = read("q");
  args.k = read("k");
  args.v = read("v");
  args.out = write("out");
  args.lse = lse(true);
  args.workspace = workspace();
  return timed([&](void* stream) {
    args.stream = stream;
    attention.forward(args);
  });
}

double Workload::backward(const RankAttention& attention) {
  prepare(attention, Pass::backward);
  BackwardArgs args;
  args.q = read("q");
  args.k = read("k");
  args.v = read("v");
  args.out = read("out");
  args.lse = lse(false);
  args.dout = read("dout");
  args.dq = write("dq");
  args.dk = write("dk");
  args.dv = write("dv");
  args.workspace = workspace();
  return timed([&](void* stream) {
    args.stream = stream;
    attention.backward(args);
  });
}

DType Workload::dtype(const std::string& name) const { return name == "lse" ? DType::fp32 : problem_.dtype; }

std::vector<std::int64_t> Workload::shape_of(const std::string& name, std::int64_t tokens) const {
  if (name == "lse") return {problem_.batch, problem_.heads, tokens};
  return {problem_.batch, tokens, is_key_side(name) ? problem_.kv_heads : problem_.heads, problem_.head_dim};
}

RowShape Workload::row_shape(const std::string& name) const {
  if (name == "lse") return {problem_.batch * problem_.heads, 1};
  return {problem_.batch, (is_key_side(name) ? problem_.kv_heads : problem_.heads) * problem_.head_dim};
}

std::int64_t Workload::elements(const std::string& name) const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape(name)) count *= size;
  return count;
}

void Workload::allocate(const std::string& name) {
  Buffer buffer(bytes(name));
  ledger_.allocate(name, bytes(name));
  const void* data = buffer.data();
  tensors_[name] = {std::move(buffer), data, nullptr, false};
}

// Results and the workspace of a pass. What the pass holds beside the tensors enters the ledger under the plan's own
// names.
void Workload::prepare(const RankAttention& attention, Pass pass) {
  const std::vector<std::string> results = result_names(pass);
  std::vector<MemoryComponent> parts;
  for (const MemoryComponent& part : attention.memory(pass))
    if (part.bytes > 0 && !has(part.name) && std::ranges::find(results, part.name) == results.end())
      parts.push_back(part);
  const std::size_t bytes = attention.workspace_bytes(pass);
  const bool has_results = std::ranges::all_of(results, [&](const std::string& name) { return has(name); });
  if (has_results && parts == workspace_parts_ && workspace_bytes_ == bytes) return;
  release_workspace();
  for (const std::string& name : results)
    if (!has(name)) allocate(name);
  if (gpu_ != nullptr)
    device_workspace_ = gpu_->allocate(gpu_index_, bytes);
  else
    workspace_ = Buffer(static_cast<std::int64_t>(bytes));
  workspace_bytes_ = bytes;
  workspace_parts_ = parts;
  for (const MemoryComponent& part : parts) ledger_.allocate(part.name, part.bytes);
}

void Workload::release_workspace() {
  for (const MemoryComponent& part : workspace_parts_) ledger_.release(part.name, part.bytes);
  workspace_parts_.clear();
  workspace_ = Buffer();
  device_workspace_.reset();
  workspace_bytes_ = 0;
}

std::array<std::int64_t, 4> Workload::shape4(const std::string& name) const {
  const std::vector<std::int64_t> sizes = shape(name);
  return {sizes[0], sizes[1], sizes[2], sizes[3]};
}

// The tensor's memory on the GPU, with what the host has unless it is about to be written.
void* Workload::place_on_device(const std::string& name, bool writes) {
  Tensor& tensor = tensors_.at(name);
  const bool is_new = tensor.on_device == nullptr;
  if (is_new) tensor.on_device = gpu_->allocate(gpu_index_, static_cast<std::size_t>(bytes(name)));
  if (is_new && !writes) tensor.on_device->put(tensor.data);
  tensor.is_newer_there = tensor.is_newer_there || writes;
  return tensor.on_device->data();
}

const void* Workload::data(const std::string& name) const {
  const Tensor& tensor = tensors_.at(name);
  if (tensor.is_newer_there) tensor.on_device->get(tensor.own.data());
  tensor.is_newer_there = false;
  return tensor.data;
}

ConstTensorView Workload::read(const std::string& name) {
  return {gpu_ != nullptr ? place_on_device(name, false) : tensors_.at(name).data, problem_.dtype, shape4(name)};
}

TensorView Workload::write(const std::string& name) {
  return {gpu_ != nullptr ? place_on_device(name, true) : tensors_.at(name).own.data(), problem_.dtype, shape4(name)};
}

std::span<float> Workload::lse(bool writes) {
  void* data = gpu_ != nullptr ? place_on_device("lse", writes) : tensors_.at("lse").own.data();
  return {static_cast<float*>(data), static_cast<std::size_t>(elements("lse"))};
}

std::span<std::byte> Workload::workspace() const {
  return {gpu_ != nullptr ? static_cast<std::byte*>(device_workspace_->data()) : workspace_.data(), workspace_bytes_};
}

}  // namespace annulus::cli
