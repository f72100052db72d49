// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// One-sided reads over UCX.
//
// One thread makes every call of libucp. It serves this process's memory to peers, posts reads and
// reports the end of each command as an event. Calls queue their command and never wait for it.
//
//   command     its event comes
//   (start)     when the memory is registered: ticket 0, text = the `packed` for a peer's connect
//   connect     when the connection is made: text = its transports
//   read        when no byte of its destinations can be written any more
//   disconnect  when all reads of the connection have had their events and the connection is gone
//   close       when all connections are gone; the last event
//
// Every connection has a worker of its own, so that its end touches no other connection, and is of
// one of three kinds:
//
//   local     ucp_get without peer error handling, if this host's kernel copies the bytes from the
//             peer's memory (cma, xpmem, knem) and no other transport takes part: such a copy needs
//             nothing from the peer and always ends. UCX has no kernel copies when peer error
//             handling is on.
//   remote    ucp_get with peer error handling, if a network card reads: UCX notices that a peer is
//             gone, and closing by force ends outstanding reads once the card writes no more.
//   messages  requests that the peer's UCX engine answers, if neither is possible (tcp). UCX can
//             emulate ucp_get over such transports, but then the process that owns the memory
//             aborts when the reader is gone ("Fatal: unexpected error: Endpoint timeout", 1.22).
//             Only the reader's own thread writes the destinations, so a read that was given up has
//             ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_fd.h"
#include "library.h"
#include "peer.h"

namespace kvstrata {

struct UcxItem {
  std::uint64_t remote_offset = 0, local_offset = 0, length = 0;
};

enum class UcxEnd : std::uint8_t {
  kDone = 0,
  kCancelled = 1,     // by cancel, disconnect or close
  kPeerGone = 2,      // the peer's process is gone, or the network to it
  kNotConnected = 3,  // no connection has this number, or it is ending
  kFailed = 4,        // text says what failed
  kNoWay = 5,         // no transport works, or none leads to the peer; text says why
};

struct UcxEvent {
  std::uint64_t ticket = 0;
  UcxEnd end = UcxEnd::kDone;
  std::string text;
};

struct UcxOptions {
  std::string library;
  // Settings of UCX, named without the prefix UCX_; they override those in the environment.
  std::vector<std::pair<std::string, std::string>> config;
  std::uint64_t memory = 0, memory_bytes = 0;  // the address that peers may read from, and length
};

class UcxEngine {
 public:
  // Begins to open; the event of ticket 0 tells the outcome. The memory belongs to the caller and
  // must stay mapped until close() has returned. Throws std::system_error if the system gives no
  // descriptor.
  explicit UcxEngine(UcxOptions options);
  ~UcxEngine();
  UcxEngine(const UcxEngine&) = delete;
  UcxEngine& operator=(const UcxEngine&) = delete;

  // Readable while events wait to be taken. Closed by the destructor.
  [[nodiscard]] int event_fd() const noexcept { return event_.fd(); }
  // Takes all events, in their order.
  std::vector<UcxEvent> take_events();

  // The caller chooses the number of a connection, and uses no number twice. `packed` is the text
  // of the peer's event of ticket 0, and `memory_bytes` is the length of the peer's memory.
  void connect(std::uint64_t ticket, std::uint64_t connection, std::string packed,
               std::uint64_t memory_bytes);
  // Reads bytes of the peer's memory into ours. Ends as kFailed, and reads nothing, unless every
  // item lies within the memory of both sides.
  void read(std::uint64_t ticket, std::uint64_t connection, std::vector<UcxItem> items);
  // Posts no more items of a read; items that are under way run to their end.
  void cancel(std::uint64_t read_ticket);
  // Ends all reads of a connection, then the connection.
  void disconnect(std::uint64_t ticket, std::uint64_t connection);
  // Ends all connections, then the thread.
  void begin_close(std::uint64_t ticket);
  // Calls begin_close() and joins the thread; events that were not taken can still be taken.
  // Idempotent.
  void close();

 private:
  struct Command;     // connection.h
  struct Connection;  // connection.h
  struct Read;        // connection.h

  struct Transports;

  // engine.cpp: commands, events and the thread
  void submit(Command command);
  void tell(std::uint64_t ticket, UcxEnd end, std::string text = {});
  void run();
  UcxEnd set_up(std::string* error);
  void tear_down();
  bool take_commands();
  void obey(Command& command);
  bool progress();
  void rest(bool recently_busy);
  std::string why(const std::string& what, ucs_status_t status);

  // connection.cpp
  void make_connection(const Command& command);
  bool make_endpoint(Connection& connection, const UcxPeer& peer, bool guarded, std::string* error);
  Transports transports(Connection& connection);
  void begin_end(Connection& connection);
  bool look_after(Connection& connection);
  void drop(Connection& connection);
  static void on_error(void* connection, ucp_ep_h endpoint, ucs_status_t status);

  // reads.cpp
  void advance(Read& read);
  ucs_status_t post_get(Read& read, const UcxItem& item);
  ucs_status_t post_request(Read& read, const UcxItem& item);
  void stop(Read& read);
  void end_item(Read& read, ucs_status_t status);
  void finish(Read& read);
  static ucs_status_t on_request(void* engine, const void* header, std::size_t header_bytes,
                                 void* data, std::size_t length, const ucp_am_recv_param_t* param);
  static ucs_status_t on_reply(void* connection, const void* header, std::size_t header_bytes,
                               void* data, std::size_t length, const ucp_am_recv_param_t* param);
  static void on_read(void* request, ucs_status_t status, void* read);

  UcxOptions options_;
  EventFd event_, wake_;
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
  ucp_mem_h memory_ = nullptr;
  std::map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<Read*> moved_;  // reads of which items have ended, for advance()
  std::size_t posted_ = 0;
  bool closing_ = false;
  std::uint64_t close_ticket_ = 0;

  std::thread thread_;
};

}  // namespace kvstrata
