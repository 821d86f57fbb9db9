// A link by UCX: shared memory within a host, TCP or RDMA between hosts.
#pragma once

#include <memory>
#include <string>

#include "link.h"

namespace xla_pp {

// Makes a link and starts its thread.
//
// Args:
//   host: Name or address of this job's master; the link binds to the network
//     interface that leads there. Empty, or UCX_NET_DEVICES in the environment: UCX
//     chooses.
//   events: What to call.
// Throws std::runtime_error with UCX's reason.
std::unique_ptr<Link> MakeUcxLink(const std::string& host, LinkEvents events);

}  // namespace xla_pp
