#include "ucx_link.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace xla_pp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kMessageId = 1;

void Check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) {
    throw std::runtime_error(std::string(what) + ": " + ucs_status_string(status));
  }
}

// Returns the local address from which `host` is reached.
bool LocalAddressTowards(const std::string& host, sockaddr_storage* local) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return false;
  bool is_known = false;
  for (const addrinfo* it = found; it && !is_known; it = it->ai_next) {
    const int fd = socket(it->ai_family, SOCK_DGRAM, 0);
    if (fd < 0) continue;
    socklen_t size = sizeof(*local);
    // Connecting a datagram socket sends nothing; it only chooses a route.
    is_known = connect(fd, it->ai_addr, it->ai_addrlen) == 0 &&
               getsockname(fd, reinterpret_cast<sockaddr*>(local), &size) == 0;
    close(fd);
  }
  freeaddrinfo(found);
  return is_known;
}

bool IsSameAddress(const sockaddr* a, const sockaddr_storage& b) {
  if (a->sa_family != b.ss_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(&b)->sin_addr.s_addr;
  }
  return a->sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(&b)->sin6_addr,
                     sizeof(in6_addr)) == 0;
}

// Returns the name of the network interface that leads to `host`, or nothing.
std::string InterfaceTowards(const std::string& host) {
  sockaddr_storage local{};
  ifaddrs* all = nullptr;
  if (!LocalAddressTowards(host, &local) || getifaddrs(&all) != 0) return "";
  std::string name;
  for (const ifaddrs* it = all; it && name.empty(); it = it->ifa_next) {
    if (it->ifa_addr && IsSameAddress(it->ifa_addr, local)) name = it->ifa_name;
  }
  freeifaddrs(all);
  return name;
}

void SetUnlessGiven(ucp_config_t* config, const char* name, const std::string& value) {
  const std::string variable = std::string("UCX_") + name;
  if (value.empty() || std::getenv(variable.c_str())) return;
  Check(ucp_config_modify(config, name, value.c_str()), variable.c_str());
}

ucp_context_h MakeContext(const std::string& host) {
  ucp_config_t* config = nullptr;
  Check(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> owner(config,
                                                               ucp_config_release);
  SetUnlessGiven(config, "NET_DEVICES", InterfaceTowards(host));
  SetUnlessGiven(config, "KEEPALIVE_INTERVAL", "1s");
  // Otherwise UCX leaves shared memory out, as endpoints must notice the peer's death.
  SetUnlessGiven(config, "POSIX_ERROR_HANDLING", "y");
  SetUnlessGiven(config, "SYSV_ERROR_HANDLING", "y");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  Check(ucp_init(&params, config, &context), "ucp_init");
  return context;
}

// All calls to UCX except those of the constructor are made by one thread.
class UcxLink : public Link {
 public:
  UcxLink(const std::string& host, LinkEvents events)
      : events_(std::move(events)), context_(MakeContext(host)) {
    try {
      Open();
    } catch (...) {
      if (worker_) ucp_worker_destroy(worker_);
      ucp_cleanup(context_);
      throw;
    }
    thread_ = std::thread([this] { Run(); });
  }

  ~UcxLink() override { Close("", std::chrono::seconds(0)); }

  std::string Address() const override { return address_; }

  void Connect(int peer, const std::string& address) override {
    Post([this, peer, address] { ConnectNow(peer, address); });
  }

  void Send(int peer, std::string header, Bytes payload) override {
    // std::function needs what can be copied.
    auto out = std::make_shared<Outgoing>();
    out->header = std::move(header);
    out->payload = std::move(payload);
    Post([this, peer, out] { SendNow(peer, out); });
  }

  bool Close(const std::string& farewell,
             std::chrono::duration<double> timeout) override {
    if (!thread_.joinable()) return true;
    Post([this, farewell, timeout] {
      is_closing_ = true;
      farewell_ = farewell;
      close_by_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
    });
    thread_.join();
    {
      std::lock_guard lock(mutex_);
      is_open_ = false;
    }
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
    return is_clean_;
  }

 private:
  struct Outgoing {
    std::string header;
    Bytes payload;
  };

  struct Endpoint {
    UcxLink* link = nullptr;
    int peer = 0;
    ucp_ep_h handle = nullptr;
    bool is_lost = false;
    std::string reason;
  };

  struct Incoming {
    UcxLink* link = nullptr;
    std::string header;
    Bytes payload;
  };

  void Open() {
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    Check(ucp_worker_create(context_, &params, &worker_), "ucp_worker_create");
    Check(ucp_worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd");

    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                         UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessageId;
    handler.cb = &UcxLink::OnMessage;
    handler.arg = this;
    Check(ucp_worker_set_am_recv_handler(worker_, &handler), "set_am_recv_handler");

    ucp_worker_attr_t attributes{};
    attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
    Check(ucp_worker_query(worker_, &attributes), "ucp_worker_query");
    address_.assign(reinterpret_cast<const char*>(attributes.address),
                    attributes.address_length);
    ucp_worker_release_address(worker_, attributes.address);
  }

  void Post(std::function<void()> command) {
    // Signalling under the lock: the worker lives as long as the link is open.
    std::lock_guard lock(mutex_);
    if (!is_open_) return;
    commands_.push_back(std::move(command));
    if (commands_.size() == 1) ucp_worker_signal(worker_);
  }

  bool RunCommands() {
    std::vector<std::function<void()>> commands;
    {
      std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (auto& command : commands) command();
    return !commands.empty();
  }

  void Run() {
    while (!IsDone()) {
      bool is_busy = RunCommands();
      while (ucp_worker_progress(worker_)) is_busy = true;
      ReportLost();
      const auto next = events_.tick();
      if (is_busy) continue;
      const ucs_status_t armed = ucp_worker_arm(worker_);
      if (armed == UCS_ERR_BUSY) continue;
      const auto left = next - Clock::now();
      const auto wait = std::chrono::ceil<std::chrono::milliseconds>(left).count();
      pollfd poll_fd{event_fd_, POLLIN, 0};
      if (wait > 0) poll(&poll_fd, 1, static_cast<int>(is_closing_ ? 1 : wait));
    }
  }

  // Ends all connections once what was sent has left: a large message is fetched by its
  // receiver, and the farewell would overtake it.
  void PartFromPeers() {
    if (has_parted_ || (num_pending_ > 0 && Clock::now() < close_by_)) return;
    has_parted_ = true;
    for (auto& [peer, endpoint] : endpoints_) {
      if (!endpoint.is_lost && !farewell_.empty()) {
        auto out = std::make_shared<Outgoing>();
        out->header = farewell_;
        SendNow(peer, out);
      }
      CloseEndpoint(&endpoint, false);
    }
  }

  // Returns whether the link is closing and nothing is under way, or time is up.
  bool IsDone() {
    if (!is_closing_) return false;
    PartFromPeers();
    if (!has_parted_) return false;
    if (num_pending_ == 0 && closing_.empty()) return true;
    std::vector<void*> left;
    for (void* request : closing_) {
      if (ucp_request_check_status(request) == UCS_INPROGRESS) {
        left.push_back(request);
      } else {
        ucp_request_free(request);
      }
    }
    closing_.swap(left);
    if (num_pending_ == 0 && closing_.empty()) return true;
    if (Clock::now() < close_by_) return false;
    is_clean_ = false;
    return true;
  }

  void ConnectNow(int peer, const std::string& address) {
    auto [found, is_new] = endpoints_.try_emplace(peer);
    if (!is_new || is_closing_) return;
    Endpoint& endpoint = found->second;
    endpoint.link = this;
    endpoint.peer = peer;
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = &UcxLink::OnError;
    params.err_handler.arg = &endpoint;
    const ucs_status_t status = ucp_ep_create(worker_, &params, &endpoint.handle);
    if (status != UCS_OK) {
      endpoint.handle = nullptr;
      Lose(&endpoint, ucs_status_string(status));
    }
  }

  void SendNow(int peer, const std::shared_ptr<Outgoing>& out) {
    const auto found = endpoints_.find(peer);
    if (found == endpoints_.end() || found->second.is_lost) return;
    auto* held = new std::pair<UcxLink*, std::shared_ptr<Outgoing>>(this, out);
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = &UcxLink::OnSent;
    params.user_data = held;
    ucs_status_ptr_t request = ucp_am_send_nbx(
        found->second.handle, kMessageId, out->header.data(), out->header.size(),
        out->payload.data(), out->payload.size(), &params);
    if (UCS_PTR_IS_PTR(request)) {
      num_pending_ += 1;
      return;
    }
    delete held;
    if (UCS_PTR_IS_ERR(request)) {
      Lose(&found->second, ucs_status_string(UCS_PTR_STATUS(request)));
    }
  }

  static void OnSent(void* request, ucs_status_t, void* user_data) {
    auto* held =
        static_cast<std::pair<UcxLink*, std::shared_ptr<Outgoing>>*>(user_data);
    held->first->num_pending_ -= 1;  // OnError reports a failure
    delete held;
    ucp_request_free(request);
  }

  static ucs_status_t OnMessage(void* arg, const void* header, size_t header_size,
                                void* data, size_t size,
                                const ucp_am_recv_param_t* params) {
    auto* link = static_cast<UcxLink*>(arg);
    const std::string_view head(static_cast<const char*>(header), header_size);
    Bytes payload(size);
    if (!(params->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
      if (size) std::memcpy(payload.data(), data, size);
      link->events_.arrived(head, std::move(payload));
      return UCS_OK;
    }
    auto* incoming = new Incoming{link, std::string(head), std::move(payload)};
    ucp_request_param_t receive{};
    receive.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    receive.cb.recv_am = &UcxLink::OnFetched;
    receive.user_data = incoming;
    ucs_status_ptr_t request = ucp_am_recv_data_nbx(
        link->worker_, data, incoming->payload.data(), size, &receive);
    if (UCS_PTR_IS_PTR(request)) {
      link->num_pending_ += 1;
      return UCS_INPROGRESS;
    }
    if (UCS_PTR_STATUS(request) == UCS_OK) {
      link->events_.arrived(incoming->header, std::move(incoming->payload));
    }
    delete incoming;
    return UCS_OK;
  }

  static void OnFetched(void* request, ucs_status_t status, size_t, void* user_data) {
    auto* incoming = static_cast<Incoming*>(user_data);
    incoming->link->num_pending_ -= 1;
    if (status == UCS_OK) {
      incoming->link->events_.arrived(incoming->header, std::move(incoming->payload));
    }
    delete incoming;
    ucp_request_free(request);
  }

  static void OnError(void* arg, ucp_ep_h, ucs_status_t status) {
    auto* endpoint = static_cast<Endpoint*>(arg);
    endpoint->link->Lose(endpoint, ucs_status_string(status));
  }

  void Lose(Endpoint* endpoint, const char* reason) {
    if (endpoint->is_lost) return;
    endpoint->is_lost = true;
    endpoint->reason = reason;
    newly_lost_.push_back(endpoint);
  }

  // Reports lost peers, not from within UCX's callbacks.
  void ReportLost() {
    std::vector<Endpoint*> lost;
    lost.swap(newly_lost_);
    for (Endpoint* endpoint : lost) {
      CloseEndpoint(endpoint, true);
      if (!is_closing_) events_.lost(endpoint->peer, endpoint->reason);
    }
  }

  void CloseEndpoint(Endpoint* endpoint, bool is_forced) {
    if (!endpoint->handle) return;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = is_forced ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint->handle, &params);
    endpoint->handle = nullptr;
    endpoint->is_lost = true;
    if (UCS_PTR_IS_PTR(request)) closing_.push_back(request);
  }

  LinkEvents events_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::string address_;
  std::thread thread_;

  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;
  bool is_open_ = true;

  // On the thread.
  std::map<int, Endpoint> endpoints_;
  std::vector<Endpoint*> newly_lost_;
  std::vector<void*> closing_;
  int64_t num_pending_ = 0;
  bool is_closing_ = false;
  bool has_parted_ = false;
  std::string farewell_;
  bool is_clean_ = true;
  Clock::time_point close_by_;
};

}  // namespace

std::unique_ptr<Link> MakeUcxLink(const std::string& host, LinkEvents events) {
  return std::make_unique<UcxLink>(host, std::move(events));
}

}  // namespace xla_pp
