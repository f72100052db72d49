// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// One-sided reads over UCX.
//
// One thread makes every call of libucp. It serves this process's regions to peers, posts reads and
// reports how each command ended as an Event; commands are queued, never waited for.
//
//   command     its event
//   (start)     when the regions are registered: ticket 0, text = what a peer's `connect` wants
//   connect     when the connection is made: text = its transports
//   read        when no byte of its destinations can be written any more
//   disconnect  when all reads of that connection have had their events and it is gone
//   close       when everything is; the last event
//
// Every connection has a worker of its own, so that its end touches no other one, and is of one of
// three kinds:
//
//   local     ucp_get without peer error handling, where this host's kernel copies the bytes from
//   the
//             peer's memory (cma and its like) and no other transport takes part: such a copy needs
//             nothing of the peer and always ends. UCX has none where peer error handling is on.
//   remote    ucp_get with peer error handling, where a network card reads: a peer that is gone is
//             noticed, and closing by force ends outstanding reads once the card writes no more.
//   messages  requests that the peer's engine answers, where neither can be (tcp). UCX has an
//             emulation of ucp_get for that, whose owner's process aborts when the reader is gone
//             ("Fatal: unexpected error: Endpoint timeout", 1.22). Only the reader's own thread
//             ever writes its destinations, so that a read that is given up has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ucx_library.h"

namespace kvstrata {

struct UcxRegion {
  std::uint64_t address = 0, length = 0;
};

struct UcxItem {
  std::uint64_t remote_offset = 0, local_offset = 0, length = 0;
  std::uint32_t remote_region = 0, local_region = 0;
};

enum class UcxEnd : std::uint8_t {
  kDone = 0,
  kCancelled = 1,     // by cancel, disconnect or close
  kPeerGone = 2,      // the peer's process, or the way to it
  kNotConnected = 3,  // there is no such connection
  kFailed = 4,        // text says what
  kNoWay = 5,         // no transport, or none that leads to the peer; text says what
};

struct UcxEvent {
  std::uint64_t ticket = 0;
  UcxEnd end = UcxEnd::kDone;
  std::string text;
};

struct UcxOptions {
  std::string library;
  // UCX's own, without their prefix UCX_, over those of the environment.
  std::vector<std::pair<std::string, std::string>> config;
  std::vector<UcxRegion> regions;
};

// A peer, as its own engine described itself.
struct UcxPeer {
  std::string address;
  struct Region {
    std::uint64_t address = 0, length = 0;
    std::string key;
  };
  std::vector<Region> regions;
  std::string secret;  // of requests; whoever was told it may read
  bool same_host = false;
};

// What `connect` wants of a peer, out of what its engine said. False: `error` says what is wrong
// with it. A peer's regions have these lengths, as the metadata around its engine's part says; UCX
// itself does not check the address and the keys that it packed (ucp_ep_create,
// ucp_ep_rkey_unpack).
bool read_ucx_peer(const std::string& packed, const std::string& boot_id,
                   std::span<const std::uint64_t> region_bytes, UcxPeer* peer, std::string* error);

class UcxEngine {
 public:
  // Begins to open; its event says how that went. Regions must live until `close` has returned.
  explicit UcxEngine(UcxOptions options);
  ~UcxEngine();
  UcxEngine(const UcxEngine&) = delete;
  UcxEngine& operator=(const UcxEngine&) = delete;

  // Readable while events wait.
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }
  std::vector<UcxEvent> take_events();

  // Connections have numbers that the caller chooses and uses once. `packed` is of a peer's open,
  // its regions have these lengths.
  void connect(std::uint64_t ticket, std::uint64_t connection, std::string packed,
               std::vector<std::uint64_t> region_bytes);
  // kFailed, and nothing is read, unless every item lies within the regions of both sides.
  void read(std::uint64_t ticket, std::uint64_t connection, std::vector<UcxItem> items);
  // Posts no more of a read; what is under way goes on to its end.
  void cancel(std::uint64_t read_ticket);
  void disconnect(std::uint64_t ticket, std::uint64_t connection);
  void begin_close(std::uint64_t ticket);
  // Ends the thread, after everything else where begin_close was not called. Idempotent.
  void close();

 private:
  struct Command;
  struct Connection;
  struct Read;

  void submit(Command command);
  void tell(std::uint64_t ticket, UcxEnd end, std::string text = {});
  void run();
  UcxEnd set_up(std::string* error);
  void tear_down();
  bool take_commands();
  void obey(Command& command);
  void make_connection(const Command& command);
  bool make_endpoint(Connection& connection, const UcxPeer& peer, bool guarded, std::string* error);
  struct Transports;
  Transports transports(Connection& connection);
  ucs_status_t post_get(Read& read, const UcxItem& item);
  ucs_status_t post_request(Read& read, const UcxItem& item);
  void advance(Read& read);
  void end_item(Read& read, ucs_status_t status);
  void finish(Read& read);
  void stop(Read& read);
  void begin_end(Connection& connection);
  bool look_after(Connection& connection);
  void drop(Connection& connection);
  bool progress();
  void rest(bool recently_busy);
  std::string why(const std::string& what, ucs_status_t status);

  static ucs_status_t on_request(void* engine, const void* header, std::size_t header_bytes,
                                 void* data, std::size_t length, const ucp_am_recv_param_t* param);
  static ucs_status_t on_reply(void* connection, const void* header, std::size_t header_bytes,
                               void* data, std::size_t length, const ucp_am_recv_param_t* param);
  static void on_read(void* request, ucs_status_t status, void* read);
  static void on_error(void* connection, ucp_ep_h endpoint, ucs_status_t status);

  UcxOptions options_;
  int event_fd_ = -1, wake_fd_ = -1;
  std::mutex mutex_;  // of the next two
  std::vector<Command> commands_;
  std::vector<UcxEvent> events_;

  // The thread's own.
  UcxLibrary ucx_;
  std::string boot_id_, secret_;
  std::uint64_t last_token_ = 0;
  ucp_context_h context_ = nullptr;
  ucp_worker_h server_ = nullptr;
  int server_fd_ = -1;
  std::vector<ucp_mem_h> memory_;
  std::map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<Read*> moved_;  // some of whose items have ended
  std::size_t posted_ = 0;
  bool closing_ = false;
  std::uint64_t close_ticket_ = 0;

  std::thread thread_;
};

}  // namespace kvstrata
