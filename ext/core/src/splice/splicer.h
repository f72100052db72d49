// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A thread that passes answers on: the chunked body that comes from an engine's socket goes to a
// client's socket, in chunks of its own, while the event loop does other work.
//
//   start ─▶ flowing ⇄ full (the client's socket takes no more: nothing is read from the engine) ─▶
//   ended
//
// Both sockets belong to the splicer from start() until take_ended() has returned the splice:
// meanwhile nobody else may read, write or close them. The splicer closes neither.
//
// When a splice has ended for a reason of the engine (kEngineClosed, kEngineFailed, kNotChunked,
// kSilent), the client has got whole chunks, so that another chunk may follow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/event_fd.h"
#include "base/status.h"
#include "splice/chunks.h"

namespace kvstrata {

enum class SpliceEnd : std::uint8_t {
  kNone = 0,
  kDone = 1,          // the whole body, and the client has its end
  kEngineClosed = 2,  // the engine closed the connection in the body
  kEngineFailed = 3,  // its socket failed
  kNotChunked = 4,    // what came is not chunked coding
  kSilent = 5,        // the engine sent nothing for silence_ns
  kClientGone = 6,    // the client closed its connection, or its side of it
  kStalled = 7,       // the client read nothing for stalled_ns
  kStopped = 8,       // stop() or close()
};

struct SpliceOptions {
  int engine_fd = -1;
  int client_fd = -1;
  std::int64_t silence_ns = 0;
  std::int64_t stalled_ns = 0;
  bool events = false;  // the body is a stream of events, to be counted and timed
};

// One answer. The owner may read `id`, and what else is public once take_ended() has returned it.
class Splice {
 public:
  SpliceEnd end = SpliceEnd::kNone;
  bool exact = false;  // kDone, and nothing came after the body's end
  std::uint64_t id = 0;
  std::uint64_t body_bytes = 0;
  std::uint64_t events = 0;         // "data:" in the body, but for what `early` had
  std::int64_t last_ns = 0;         // when its last part came (CLOCK_MONOTONIC)
  std::vector<std::uint32_t> gaps;  // times between parts with events, by bucket
  std::int64_t gaps_ns = 0;         // their sum
  std::string tail;  // the last bytes of the body, at least kTailBytes if it had them

  static constexpr std::size_t kTailBytes = 4096;

 private:
  friend class Splicer;

  SpliceOptions options_;
  ChunkReader reader_;
  std::string pending_;  // for the client; not empty while it is full
  SpliceEnd after_pending_ = SpliceEnd::kNone;
  std::int64_t heard_ns_ = 0;
  std::int64_t full_ns_ = 0;  // since when; 0: it flows
  bool watched_ = false;      // the thread has the sockets
  Splice* next_in_round_ = nullptr;
  std::shared_ptr<Splice> next_ended_;
};

// start(), stop(), take_ended() and close() belong to one thread, the owner's.
class Splicer {
 public:
  // `bounds_ns`: upper bounds of the buckets of `gaps`, ascending; a last bucket has no bound.
  static Status create(std::vector<std::int64_t> bounds_ns, std::unique_ptr<Splicer>* out) noexcept;
  ~Splicer();
  Splicer(const Splicer&) = delete;
  Splicer& operator=(const Splicer&) = delete;

  // Readable when splices have ended.
  [[nodiscard]] int event_fd() const noexcept { return ended_event_.fd(); }

  // Sends `head` and what `early`, the first bytes of the coded body, has of the body; the rest
  // follows in the splicer's thread, if that is still `*under_way`. Otherwise `*out` has ended
  // already, and is not among take_ended(). kClosed after close(): the sockets are as they were.
  Status start(const SpliceOptions& options, std::span<const std::uint8_t> head,
               std::span<const std::uint8_t> early, std::shared_ptr<Splice>* out,
               bool* under_way) noexcept;

  // Ends a splice soon, unless it has ended.
  void stop(std::uint64_t id) noexcept;

  // A splice that has ended and was not taken yet; null if none is left.
  std::shared_ptr<Splice> take_ended() noexcept;

  // Ends all splices, which take_ended() then returns. Idempotent.
  void close() noexcept;

 private:
  explicit Splicer(std::vector<std::int64_t> bounds_ns) noexcept
      : bounds_ns_(std::move(bounds_ns)) {}

  void run() noexcept;
  void pass(Splice& splice, std::uint32_t flags) noexcept;
  void flush(Splice& splice) noexcept;
  void count(Splice& splice, const std::uint8_t* body, std::size_t bytes,
             std::int64_t now_ns) const noexcept;
  static SpliceEnd send(Splice& splice, const std::uint8_t* bytes, std::size_t length) noexcept;
  bool watch(Splice& splice) noexcept;
  bool watch_client(Splice& splice, int operation) const noexcept;
  void end(Splice& splice, SpliceEnd why) noexcept;
  void obey() noexcept;
  void forgive(std::int64_t now_ns, std::int64_t paused_ns) noexcept;
  void sweep(std::int64_t now_ns) noexcept;
  void publish() noexcept;

  const std::vector<std::int64_t> bounds_ns_;
  int epoll_fd_ = -1;
  EventFd wake_;
  EventFd ended_event_;
  std::thread thread_;
  std::atomic<bool> closing_{false};
  std::atomic<std::size_t> open_count_{0};  // of watched splices
  std::uint64_t last_id_ = 0;
  std::vector<std::uint8_t> buffer_;  // of the thread
  Splice* ended_in_round_ = nullptr;  // of the thread
  std::mutex mutex_;                  // a leaf; protects what follows
  std::unordered_map<std::uint64_t, std::shared_ptr<Splice>> open_;
  std::vector<std::uint64_t> to_stop_;
  std::shared_ptr<Splice> ended_;  // a chain
};

}  // namespace kvstrata
