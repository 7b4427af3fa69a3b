#include "kernels/cuda/nccl_link.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/memory.h"

#if ANNULUS_NCCL
#include <dlfcn.h>
#include <nccl.h>
#endif

namespace annulus::cuda {
namespace {

// The GPU as NCCL tells GPUs apart: the host, which NCCL_HOSTID may rename, and the place on its bus.
std::string host_id() {
  if (const char* id = std::getenv("NCCL_HOSTID"); id != nullptr) return id;
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string bus_id(int device) {
  std::array<char, 32> text{};
  check(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device),
        "find cuda:" + std::to_string(device));
  return text.data();
}

#if ANNULUS_NCCL

// Those functions of NCCL that are used here.
class Nccl {
 public:
  static const Nccl& get() {
    static const Nccl nccl;  // tried again where it fails
    return nccl;
  }

  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&ncclCommGetAsyncError) comm_state = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclGetErrorString) error_text = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;

 private:
  Nccl() {
    const char* const given = std::getenv("ANNULUS_NCCL");
    const char* const name = given == nullptr ? "libnccl.so.2" : given;
    void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* reason = dlerror();
      throw Unsupported("transport nccl needs NCCL, a library that the system finds as libnccl.so.2; got " +
                        std::string(reason == nullptr ? "none" : reason) +
                        ": install it, or set ANNULUS_NCCL to its file, or stage through the host");
    }
    find(library, "ncclGetUniqueId", get_unique_id);
    find(library, "ncclCommInitRankConfig", comm_init);
    find(library, "ncclCommGetAsyncError", comm_state);
    find(library, "ncclCommAbort", comm_abort);
    find(library, "ncclGroupStart", group_start);
    find(library, "ncclGroupEnd", group_end);
    find(library, "ncclSend", send);
    find(library, "ncclRecv", receive);
    find(library, "ncclGetErrorString", error_text);
    find(library, "ncclGetLastError", last_error);
  }

  template <class F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr)
      throw Unsupported(std::string("transport nccl needs NCCL 2.14 or newer; got one without ") + name +
                        ": install a newer one");
  }
};

// A communicator that never blocks: every call may answer that it is still at it, and state() says when it is not.
class NcclLink final : public DeviceLink {
 public:
  NcclLink(int device, const std::string& id, int rank, int size) : device_(device) {
    const DeviceScope scope(device_);
    ncclUniqueId unique{};
    if (id.size() != sizeof unique)
      throw TransportError("an id of NCCL has " + std::to_string(sizeof unique) + " bytes; got " +
                           std::to_string(id.size()) + ": start all ranks with the same NCCL");
    std::memcpy(&unique, id.data(), sizeof unique);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check_result(nccl_.comm_init(&comm_, size, unique, rank, &config), "connect");
  }
  ~NcclLink() override { cut(); }

  bool ready() override {
    if (comm_ == nullptr) throw TransportError("the NCCL link has been cut");
    ncclResult_t state = ncclSuccess;
    check_result(nccl_.comm_state(comm_, &state), "ask how it is");
    check_result(state, "go on");
    return state == ncclSuccess;
  }

  void queue(std::span<const LinkMessage> sends, std::span<const LinkMessage> receives, void* stream) override {
    const DeviceScope scope(device_);
    const auto on = static_cast<cudaStream_t>(stream);
    check_result(nccl_.group_start(), "begin a group");
    ncclResult_t first = ncclSuccess;
    const auto note = [&](ncclResult_t result) {
      if (first == ncclSuccess && result != ncclInProgress) first = result;
    };
    for (const auto& [peer, data, bytes] : sends)
      note(nccl_.send(data, static_cast<std::size_t>(bytes), ncclInt8, peer, comm_, on));
    for (const auto& [peer, data, bytes] : receives)
      note(nccl_.receive(data, static_cast<std::size_t>(bytes), ncclInt8, peer, comm_, on));
    note(nccl_.group_end());
    check_result(first, "move messages");
  }

  void cut() noexcept override {
    if (comm_ != nullptr) nccl_.comm_abort(comm_);
    comm_ = nullptr;
  }

 private:
  void check_result(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* const detail = comm_ == nullptr ? nullptr : nccl_.last_error(comm_);
    throw TransportError(std::string("NCCL could not ") + what + ": " + nccl_.error_text(result) +
                         (detail == nullptr || *detail == 0 ? "" : std::string(": ") + detail) +
                         "; NCCL_DEBUG=WARN says more");
  }

  const Nccl& nccl_ = Nccl::get();
  int device_;
  ncclComm_t comm_ = nullptr;
};

std::string new_id() {
  ncclUniqueId id{};
  const ncclResult_t result = Nccl::get().get_unique_id(&id);
  if (result != ncclSuccess)
    throw TransportError(std::string("NCCL could not begin: ") + Nccl::get().error_text(result) +
                         "; NCCL_DEBUG=WARN says more, NCCL_SOCKET_IFNAME names the network interface");
  return {reinterpret_cast<const char*>(&id), sizeof id};
}

#endif

}  // namespace

LinkMaker nccl_links(int device) {
  LinkMaker maker;
  const std::string host = host_id(), bus = bus_id(device);
  maker.gpu = host + " " + bus;
  maker.text = "GPU " + bus + " of host " + host;
#if ANNULUS_NCCL
  try {
    Nccl::get();
  } catch (const Error& error) {
    maker.trouble = error.what();
  }
  maker.new_id = new_id;
  maker.link = [device](const std::string& id, int rank, int size) {
    return std::make_unique<NcclLink>(device, id, rank, size);
  };
#else
  maker.trouble =
      "transport nccl needs a CUDA backend built with NCCL; got one without: build it where nccl.h is found";
#endif
  return maker;
}

}  // namespace annulus::cuda
