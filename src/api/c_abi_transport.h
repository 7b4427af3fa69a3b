// A transport made of functions that a C program hands over: one for memory of the host, and one for each GPU that it
// has been asked for. All of them use the same functions, in turn: a rank makes one call at a time.
#pragma once

#include <map>
#include <memory>

#include "annulus/annulus_ranks.h"
#include "annulus/attention.h"
#include "annulus/device_transports.h"

struct annulus_transport {
 public:
  explicit annulus_transport(const annulus_transport_callbacks& callbacks);

  // The one that moves memory of the device. The first call for a GPU is a collective.
  annulus::Transport& of(const annulus::Options& options, const annulus::PayloadOptions& payload);
  annulus::Transport& host() { return *host_; }

 private:
  std::unique_ptr<annulus::Transport> carried(bool for_gpu) const;

  annulus_transport_callbacks callbacks_;
  std::unique_ptr<annulus::Transport> host_;
  std::map<std::pair<int, annulus::Payload>, std::unique_ptr<annulus::Transport>> on_gpus_;
};
