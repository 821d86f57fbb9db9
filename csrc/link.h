// Carries bytes between processes.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "message.h"

namespace xla_pp {

// The events of a link. All calls come from the link's own thread.
struct LinkEvents {
  std::function<void(std::string_view header, Bytes payload)> arrived;
  std::function<void(int peer, const std::string& reason)> lost;
  // Called now and then; returns when to be called again at the latest.
  std::function<std::chrono::steady_clock::time_point()> tick;
};

// No call but `Close` waits for a peer or for the network.
class Link {
 public:
  virtual ~Link() = default;

  // Returns what peers need to connect to this process.
  virtual std::string Address() const = 0;
  virtual void Connect(int peer, const std::string& address) = 0;
  // Sends to a peer that was connected; messages to lost peers are dropped.
  virtual void Send(int peer, std::string header, Bytes payload) = 0;
  // Sends `farewell` to all peers after what was sent before, and ends. Takes at most
  // `timeout`; returns whether all has arrived.
  virtual bool Close(const std::string& farewell,
                     std::chrono::duration<double> timeout) = 0;
};

}  // namespace xla_pp
