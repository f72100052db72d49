// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// UcxEngine: connections, from a peer's description to their end.
#include "connection.h"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

namespace kvstrata {

namespace {

using Clock = std::chrono::steady_clock;

// How long a connection that ends waits for its reads; then its worker is destroyed, which ends
// them.
constexpr std::chrono::seconds kForceAfter{2};
constexpr std::size_t kMostTransports = 16;

bool is_kernel_copy(std::string_view transport) {
  return transport == "cma" || transport == "xpmem" || transport == "knem";
}

bool is_shared_memory(std::string_view transport) {
  return transport == "posix" || transport == "sysv" || transport == "self";
}

// Whether UCX would emulate ucp_get by messages over this transport.
bool only_sends(std::string_view transport) {
  return transport == "tcp" || transport.starts_with("ud") || is_shared_memory(transport);
}

}  // namespace

struct UcxEngine::Transports {
  std::string names;
  bool only_kernel_copies = false, one_sided = false;
};

void UcxEngine::make_connection(const Command& command) {
  UcxPeer peer;
  std::string error;
  if (!read_ucx_peer(command.packed, boot_id_, command.memory_bytes, &peer, &error)) {
    tell(command.ticket, UcxEnd::kFailed, error);
    return;
  }
  auto connection = std::make_unique<Connection>();
  connection->engine = this;
  Transports used;
  bool made = peer.same_host && make_endpoint(*connection, peer, /*guarded=*/false, &error);
  if (made) used = transports(*connection);
  if (!made || !used.only_kernel_copies) {
    drop(*connection);
    made = make_endpoint(*connection, peer, /*guarded=*/true, &error);
    if (made) used = transports(*connection);
  }
  if (!made) {
    drop(*connection);
    tell(command.ticket, UcxEnd::kNoWay, error);
    return;
  }
  connection->messages = !used.one_sided;
  connection->memory = peer.memory;
  connection->memory_bytes = peer.memory_bytes;
  connection->secret = std::move(peer.secret);
  connections_.emplace(command.connection, std::move(connection));
  tell(command.ticket, UcxEnd::kDone, used.names + (used.one_sided ? "" : " (messages)"));
}

bool UcxEngine::make_endpoint(Connection& connection, const UcxPeer& peer, bool guarded,
                              std::string* error) {
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucs_status_t status = ucx_.ucp_worker_create(context_, &worker_params, &connection.worker);
  if (status != UCS_OK) {
    connection.worker = nullptr;
    *error = why("UCX's worker cannot be made", status);
    return false;
  }
  status = ucx_.ucp_worker_get_efd(connection.worker, &connection.fd);
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kUcxReplyId;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = &on_reply;
  handler.arg = &connection;
  if (status == UCS_OK) status = ucx_.ucp_worker_set_am_recv_handler(connection.worker, &handler);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_NONE;
  if (guarded) {
    params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {&on_error, &connection};
  }
  connection.guarded = guarded;
  if (status == UCS_OK)
    status = ucx_.ucp_ep_create(connection.worker, &params, &connection.endpoint);
  if (status != UCS_OK) {
    connection.endpoint = nullptr;
    *error = why("UCX has no way to the peer with the transports of both sides (p2p.tcp, UCX_TLS)",
                 status);
    return false;
  }
  status = ucx_.ucp_ep_rkey_unpack(connection.endpoint, peer.key.data(), &connection.key);
  if (status == UCS_OK) return true;
  connection.key = nullptr;
  *error = why("UCX cannot use the key of its memory", status);
  return false;
}

// The transports of a connection, each name once. Empty if this libucp cannot name them.
UcxEngine::Transports UcxEngine::transports(Connection& connection) {
  Transports used;
  ucp_transport_entry_t entries[kMostTransports] = {};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries;
  attributes.transports.num_entries = kMostTransports;
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  if (ucx_.ucp_ep_query(connection.endpoint, &attributes) != UCS_OK) return used;
  bool network = false;
  std::vector<std::string_view> seen;
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
    const std::string_view name = entries[i].transport_name;
    used.one_sided |= !only_sends(name);
    network |= !is_kernel_copy(name) && !is_shared_memory(name);
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) continue;
    used.names += (seen.empty() ? "" : ",") + std::string(name);
    seen.push_back(name);
  }
  used.only_kernel_copies = used.one_sided && !network;
  return used;
}

void UcxEngine::begin_end(Connection& connection) {
  if (connection.ending) return;
  connection.ending = true;
  connection.force_at = Clock::now() + kForceAfter;
  for (Read& read : connection.reads)
    stop(read);
  if (!connection.guarded) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucx_.ucp_ep_close_nbx(connection.endpoint, &param);
  connection.endpoint = nullptr;
  if (UCS_PTR_IS_PTR(request)) connection.closing = request;
}

// Advances a connection that is ending. Returns false if it has ended and must be erased.
bool UcxEngine::look_after(Connection& connection) {
  if (connection.broken) begin_end(connection);
  if (!connection.ending) return true;
  if (connection.closing != nullptr &&
      ucx_.ucp_request_check_status(connection.closing) != UCS_INPROGRESS) {
    ucx_.ucp_request_free(connection.closing);
    connection.closing = nullptr;
  }
  const bool over = connection.reads.empty() && connection.closing == nullptr;
  if (!over && Clock::now() < connection.force_at) return true;
  drop(connection);
  for (Read& read : connection.reads) {
    // UCX writes nothing on behalf of a worker that was destroyed.
    posted_ -= read.posted;
    read.posted = 0;
    if (read.status == UCS_OK) read.status = UCS_ERR_CANCELED;
  }
  while (!connection.reads.empty())
    finish(connection.reads.front());
  // A broken connection stays known until it is disconnected, so that later reads end as kPeerGone.
  if (connection.tickets.empty() && !closing_) return true;
  for (const std::uint64_t ticket : connection.tickets)
    tell(ticket, UcxEnd::kDone);
  return false;
}

// Frees the connection's key, endpoint and worker.
void UcxEngine::drop(Connection& connection) {
  if (connection.key != nullptr) ucx_.ucp_rkey_destroy(connection.key);
  connection.key = nullptr;
  connection.closing = nullptr;
  if (connection.worker != nullptr) ucx_.ucp_worker_destroy(connection.worker);
  connection.worker = nullptr;
  connection.endpoint = nullptr;
}

void UcxEngine::on_error(void* connection, ucp_ep_h /*endpoint*/, ucs_status_t /*status*/) {
  static_cast<Connection*>(connection)->broken = true;
}

}  // namespace kvstrata
