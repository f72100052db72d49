// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Inside the UCX engine: a command for its thread, a connection and a read. Only the thread touches
// connections and reads.
//
//   connection   made -> broken (the peer is gone: no read begins, its number stays known)
//                made | broken -> ending (reads stop) -> dropped (UCX has freed all its resources)
//   read         posting -> stopped (nothing more is posted) -> finished (no posted item is left)
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine.h"

namespace kvstrata {

// The ids of the active messages: a request for bytes, and its reply.
inline constexpr unsigned kUcxRequestId = 1, kUcxReplyId = 2;

// A request of a caller to the thread, which obeys the commands in the order of the calls.
struct UcxEngine::Command {
  enum class Kind { kConnect, kRead, kCancel, kDisconnect, kClose };
  Kind kind;
  std::uint64_t ticket = 0, connection = 0;
  std::string packed;
  std::uint64_t memory_bytes = 0;  // length of the peer's memory
  std::vector<UcxItem> items;
};

struct UcxEngine::Read {
  UcxEngine* engine;
  Connection* connection;
  std::uint64_t ticket;
  std::vector<UcxItem> items;
  std::size_t next = 0, posted = 0;  // index of the first item not posted; operations under way
  std::uint64_t begun_bytes = 0;     // of items[next], if the item takes several messages
  ucs_status_t status = UCS_OK;
  bool stopped = false, moved = false;  // moved: the read is in UcxEngine::moved_
};

struct UcxEngine::Connection {
  UcxEngine* engine;
  ucp_worker_h worker = nullptr;
  int fd = -1;
  ucp_ep_h endpoint = nullptr;
  bool guarded = false, messages = false, broken = false, ending = false;
  std::chrono::steady_clock::time_point force_at;
  void* closing = nullptr;                     // UCX's request that closes the endpoint, or null
  std::vector<std::uint64_t> tickets;          // of the disconnects that wait for its end
  std::uint64_t memory = 0, memory_bytes = 0;  // of the peer
  ucp_rkey_h key = nullptr;
  std::string secret;
  std::list<Read> reads;
  struct Wanted {
    Read* read;
    void* destination;
    std::size_t length;
  };
  std::unordered_map<std::uint64_t, Wanted> wanted;  // requests without a reply yet, by token
};

}  // namespace kvstrata
