#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <tuple>

#include "io/atomic_file.h"
#include "io/file_error.h"
#include "io/json_string.h"
#include "io/safetensors.h"
#include "io/safetensors_format.h"

namespace annulus {
namespace {

constexpr std::size_t kDataAlignment = 64;

void check_text(std::string_view text, std::string_view source) {
  if (!is_utf8(text)) reject_file(source, "names and metadata must be UTF-8", printable(text), "choose another text");
}

void check_tensors(std::span<const FileTensor> tensors, std::span<const std::size_t> order, std::string_view source) {
  for (const FileTensor& tensor : tensors) {
    check_consistent(tensor, source);
    check_text(tensor.name, source);
    if (tensor.name == kMetadataKey) {
      reject_file(source, "a tensor must not have the name of the metadata", printable(tensor.name),
                  "choose another name");
    }
  }
  std::vector<std::size_t> by_name(order.begin(), order.end());
  const auto name_of = [&](std::size_t i) -> const std::string& { return tensors[i].name; };
  std::ranges::sort(by_name, std::less<>{}, name_of);
  const auto twice = std::ranges::adjacent_find(by_name, std::equal_to<>{}, name_of);
  if (twice != by_name.end()) {
    reject_file(source, "names must be unique", printable(name_of(*twice)) + " twice", "choose another name");
  }
}

std::string metadata_json(const FileMetadata& metadata, std::string_view source) {
  if (metadata.size() > kMaxSafetensorsMetadataEntries) {
    reject_file(source, "metadata has at most " + std::to_string(kMaxSafetensorsMetadataEntries) + " entries",
                std::to_string(metadata.size()), "store fewer");
  }
  std::string json;
  for (const auto& [key, value] : metadata) {
    check_text(key, source);
    check_text(value, source);
    if (!json.empty()) json += ",";
    json.append(json_string(key)).append(":").append(json_string(value));
  }
  return json_string(kMetadataKey) + ":{" + json + "}";
}

std::string tensor_json(const FileTensor& tensor, std::size_t begin) {
  const std::array offsets{static_cast<std::int64_t>(begin), static_cast<std::int64_t>(begin + tensor.bytes.size())};
  return json_string(tensor.name) + R"(:{"dtype":")" + std::string(name(tensor.type)) + R"(","shape":)" +
         shape_text(tensor.shape) + R"(,"data_offsets":)" + shape_text(offsets) + "}";
}

}  // namespace

SafetensorsLayout lay_out_safetensors(std::span<const FileTensor> tensors, const FileMetadata& metadata,
                                      std::string_view source) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  check_tensors(tensors, order, source);
  std::ranges::sort(order, std::less<>{}, [&](std::size_t i) {
    return std::tuple(-size_of(tensors[i].type), std::string_view(tensors[i].name));
  });

  std::string json = metadata.empty() ? "" : metadata_json(metadata, source);
  std::size_t begin = 0;
  for (const std::size_t i : order) {
    if (!json.empty()) json += ",";
    json += tensor_json(tensors[i], begin);
    begin += tensors[i].bytes.size();
  }

  std::string header = std::string(sizeof(std::uint64_t), '\0') + "{" + json + "}";
  header.resize((header.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment, ' ');
  const std::uint64_t header_bytes = header.size() - sizeof header_bytes;
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    reject_file(source, "a safetensors header has at most " + std::to_string(kMaxSafetensorsHeaderBytes) + " bytes",
                std::to_string(header_bytes), "store fewer tensors in one file, or shorten names and metadata");
  }
  std::memcpy(header.data(), &header_bytes, sizeof header_bytes);
  return {std::move(header), std::move(order)};
}

void write_safetensors(const std::filesystem::path& path, std::span<const FileTensor> tensors,
                       const FileMetadata& metadata) {
  const SafetensorsLayout layout = lay_out_safetensors(tensors, metadata, path.string());
  AtomicFile file(path);
  file.write(layout.header);
  for (const std::size_t i : layout.order) file.write(tensors[i].bytes);
  file.commit();
}

}  // namespace annulus
