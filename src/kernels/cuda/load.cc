#include "kernels/cuda/load.h"

#include <dlfcn.h>

#include <filesystem>

#include "annulus/errors.h"
#include "kernels/device.h"

namespace annulus::cuda {
namespace {

constexpr const char* kLibrary = "libannulus_cuda.so";

// Beside the library that this code is in, or where the system looks for libraries.
void* open_library() {
  Dl_info own;
  if (dladdr(reinterpret_cast<const void*>(&load_backend), &own) != 0 && own.dli_fname != nullptr) {
    const std::filesystem::path beside = std::filesystem::path(own.dli_fname).replace_filename(kLibrary);
    std::error_code ignored;
    if (std::filesystem::exists(beside, ignored)) return dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  return dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
}

std::unique_ptr<Backend> open_backend() {
  void* library = open_library();
  if (library == nullptr) {
    const char* reason = dlerror();
    throw DeviceError(std::string("device cuda needs the CUDA backend, ") + kLibrary + " beside libannulus; got " +
                      (reason == nullptr ? "none" : reason) +
                      ": build with ANNULUS_CUDA=ON where nvcc is, or use device cpu");
  }
  const auto make = reinterpret_cast<MakeBackend>(dlsym(library, kMakeBackend));
  std::unique_ptr<Backend> backend(make == nullptr ? nullptr : make(ANNULUS_VERSION));
  if (backend == nullptr)
    throw DeviceError(std::string("the CUDA backend must be of version " ANNULUS_VERSION "; got another ") + kLibrary +
                      ": install both libraries together");
  return backend;
}

}  // namespace

const Backend& load_backend() {
  static const std::unique_ptr<Backend> backend = open_backend();  // tried again where it fails
  return *backend;
}

int device_index(const std::string& device) {
  const Device parsed = parse_device(device);
  return parsed.index ? *parsed.index : load_backend().current_device();
}

PassOptions pass_options(const Options& options) {
  PassOptions chosen;
  chosen.device = device_index(options.device);
  if (!options.instruction_set.empty()) chosen.kernel = options.instruction_set;
  chosen.deterministic = options.deterministic;
  return chosen;
}

}  // namespace annulus::cuda
