// DeviceTransport: what the transports have in common that move GPU memory beside a transport of the host. The host's
// transport carries texts, exchanges without a stream, and whatever the ranks have to tell each other on the way: it is
// where ranks are watched and failures are heard of, so its words are the words of this one. Whatever it does, it does
// with the rank's GPU as the device of the calling thread: it may have been given memory there (borrower.h).
#pragma once

#include <mutex>

#include "annulus/transport.h"
#include "transport/device_copies.h"
#include "transport/trouble.h"

namespace annulus {

class DeviceTransport : public Transport {
 public:
  DeviceTransport(std::unique_ptr<Transport> host, std::unique_ptr<DeviceCopies> copies, bool blocking);

  int rank() const final { return host_->rank(); }
  int size() const final { return host_->size(); }

  void post(const Exchange& exchange) final;
  bool poll() final;
  void wait() final;
  std::vector<std::string> all_gather(const std::string& text) final;
  void abort(const std::string& reason) noexcept final;

 protected:
  // Begins exchange_; the stream's moment of it is posted_. Does not wait for anything.
  virtual void begin() = 0;
  // Moves on; true when all receives are queued or done and nothing that is sent is needed any more. When it may wait
  // it returns true or throws.
  virtual bool advance(bool may_wait) = 0;
  // All is moved, or queued on lanes: makes the exchange's stream wait for those.
  virtual void hold() = 0;
  // Afterwards nothing reads or writes memory of exchange_.
  virtual void drop() noexcept { copies_->settle(); }

  void close() noexcept;  // for destructors: a rank that leaves in the middle says so
  void nap();             // while a GPU works: hears of failures, shows that this rank lives

  std::unique_ptr<Transport> host_;
  std::unique_ptr<DeviceCopies> copies_;
  std::unique_ptr<DeviceEvent> posted_;
  Exchange exchange_;  // under way on GPUs, without empty messages

 private:
  bool finish(bool may_wait);
  void count_host();
  template <class F>
  auto guarded(F f);

  bool blocking_;
  std::mutex turn_;  // one thread of this rank at a time; guards what is here
  bool under_way_ = false;
  bool held_ = true;
  // Counters of the host's transport, which count for this one when they are of exchanges without a stream.
  bool passes_through_ = false;
  std::int64_t host_sent_ = 0, host_received_ = 0;
  int naps_ = 0;
};

}  // namespace annulus
