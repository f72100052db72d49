// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// UcxEngine: reads, from their items to their event. On a local or remote connection an item is one
// ucp_get; on a connection with messages the peer's UCX engine answers requests with bytes.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "connection.h"

namespace kvstrata {

namespace {

// The most operations of one read that are under way, so that the rest can still be cancelled.
constexpr std::size_t kWindow = 64;
// The most bytes that one request asks for: UCX copies messages through buffers.
constexpr std::uint64_t kMessageBytes = 256 << 10;

struct Request {
  char secret[kUcxSecretBytes];
  std::uint64_t token, address, length;
};

struct Reply {
  std::uint64_t token, length;  // 0: refused
};

}  // namespace

// Posts items up to the window. Finishes the read if nothing is left to post or to wait for.
void UcxEngine::advance(Read& read) {
  while (!read.stopped && read.next < read.items.size() && read.posted < kWindow) {
    UcxItem item = read.items[read.next];
    if (read.connection->messages) {
      item.remote_offset += read.begun_bytes;
      item.local_offset += read.begun_bytes;
      const std::uint64_t left = item.length - read.begun_bytes;
      item.length = std::min(left, kMessageBytes);
      read.begun_bytes += item.length;
      if (item.length == left) {
        read.begun_bytes = 0;
        ++read.next;
      }
    } else {
      ++read.next;
    }
    const ucs_status_t status =
        read.connection->messages ? post_request(read, item) : post_get(read, item);
    if (status == UCS_INPROGRESS) {
      ++read.posted;
      ++posted_;
    } else if (status != UCS_OK) {
      read.status = status;
      read.stopped = true;
    }
  }
  if (read.posted == 0 && (read.stopped || read.next == read.items.size())) finish(read);
}

ucs_status_t UcxEngine::post_get(Read& read, const UcxItem& item) {
  Connection& connection = *read.connection;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = &on_read;
  param.user_data = &read;
  param.memh = memory_;
  const std::uint64_t local = options_.memory + item.local_offset;
  void* request = ucx_.ucp_get_nbx(connection.endpoint, reinterpret_cast<void*>(local), item.length,
                                   connection.memory + item.remote_offset, connection.key, &param);
  return UCS_PTR_IS_PTR(request) ? UCS_INPROGRESS : UCS_PTR_STATUS(request);
}

// Posts no more items of a read. Requests over messages end at once; a ucp_get runs to its end.
void UcxEngine::stop(Read& read) {
  const bool unfinished = read.next < read.items.size() || read.posted > 0;
  if (read.connection->messages) {
    // Replies that come later find no entry in `wanted` and are ignored.
    std::erase_if(read.connection->wanted, [&](const auto& w) { return w.second.read == &read; });
    posted_ -= read.posted;
    read.posted = 0;
  }
  read.stopped = true;
  if (unfinished && read.status == UCS_OK) read.status = UCS_ERR_CANCELED;
  if (!read.moved) {
    read.moved = true;
    moved_.push_back(&read);
  }
}

ucs_status_t UcxEngine::post_request(Read& read, const UcxItem& item) {
  Connection& connection = *read.connection;
  Request message{};
  std::memcpy(message.secret, connection.secret.data(), kUcxSecretBytes);
  message.token = ++last_token_;
  message.address = connection.memory + item.remote_offset;
  message.length = item.length;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
  void* request = ucx_.ucp_am_send_nbx(connection.endpoint, kUcxRequestId, &message,
                                       sizeof(message), nullptr, 0, &param);
  if (UCS_PTR_IS_ERR(request)) return UCS_PTR_STATUS(request);
  if (UCS_PTR_IS_PTR(request)) ucx_.ucp_request_free(request);  // the sending goes on
  const std::uint64_t local = options_.memory + item.local_offset;
  connection.wanted[message.token] = {&read, reinterpret_cast<void*>(local), item.length};
  return UCS_INPROGRESS;
}

// Answers a peer's request with the bytes that it names, or refuses it: the secret must be ours,
// and the bytes must lie in our memory.
ucs_status_t UcxEngine::on_request(void* engine, const void* header, std::size_t header_bytes,
                                   void* /*data*/, std::size_t /*length*/,
                                   const ucp_am_recv_param_t* from) {
  UcxEngine& self = *static_cast<UcxEngine*>(engine);
  Request asked;
  if (header_bytes != sizeof(asked) || (from->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) {
    return UCS_OK;
  }
  std::memcpy(&asked, header, sizeof(asked));
  Reply reply{asked.token, 0};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
  const std::uint64_t first = self.options_.memory, bytes = self.options_.memory_bytes;
  if (std::memcmp(asked.secret, self.secret_.data(), kUcxSecretBytes) == 0 &&
      asked.length <= kMessageBytes && asked.length <= bytes && asked.address >= first &&
      asked.address - first <= bytes - asked.length) {
    reply.length = asked.length;
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = self.memory_;
  }
  void* request = self.ucx_.ucp_am_send_nbx(
      from->reply_ep, kUcxReplyId, &reply, sizeof(reply),
      reply.length > 0 ? reinterpret_cast<void*>(asked.address) : nullptr, reply.length, &param);
  // The outcome is ignored: a reader that is gone needs no reply.
  if (UCS_PTR_IS_PTR(request)) self.ucx_.ucp_request_free(request);
  return UCS_OK;
}

ucs_status_t UcxEngine::on_reply(void* of, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t length, const ucp_am_recv_param_t* param) {
  Connection& connection = *static_cast<Connection*>(of);
  Reply reply;
  if (header_bytes != sizeof(reply)) return UCS_OK;
  std::memcpy(&reply, header, sizeof(reply));
  const auto found = connection.wanted.find(reply.token);
  if (found == connection.wanted.end()) return UCS_OK;
  const Connection::Wanted wanted = found->second;
  connection.wanted.erase(found);
  const bool whole = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 &&
                     length == wanted.length && reply.length == wanted.length;
  if (whole) std::memcpy(wanted.destination, data, length);
  connection.engine->end_item(*wanted.read, whole ? UCS_OK : UCS_ERR_REJECTED);
  return UCS_OK;
}

void UcxEngine::on_read(void* request, ucs_status_t status, void* of) {
  Read& read = *static_cast<Read*>(of);
  read.engine->ucx_.ucp_request_free(request);
  read.engine->end_item(read, status);
}

void UcxEngine::end_item(Read& read, ucs_status_t status) {
  --read.posted;
  --posted_;
  if (status != UCS_OK) {
    // Any other error says more than that an item was cancelled.
    if (read.status == UCS_OK || read.status == UCS_ERR_CANCELED) read.status = status;
    read.stopped = true;
  }
  if (!read.moved) {
    read.moved = true;
    moved_.push_back(&read);
  }
}

void UcxEngine::finish(Read& read) {
  Connection& connection = *read.connection;
  assert(read.posted == 0);
  if (read.moved) std::erase(moved_, &read);
  if (read.status == UCS_OK) {
    tell(read.ticket, UcxEnd::kDone);
  } else if (read.status == UCS_ERR_CANCELED && !connection.broken) {
    tell(read.ticket, UcxEnd::kCancelled);
  } else {
    // Either the peer is gone or it has unregistered its memory: no later read could succeed.
    connection.broken = true;
    tell(read.ticket, UcxEnd::kPeerGone, ucx_.ucs_status_string(read.status));
  }
  connection.reads.remove_if([&read](const Read& other) { return &other == &read; });
}

}  // namespace kvstrata
