// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The interface of a storage medium that is written in C++. An extension derives a class from
// Connector and passes an object of it to Python in a capsule (connector_capsule_name);
// kvstrata.tiers.native_adapter.NativeAdapter makes a storage adapter from the capsule. An
// extension needs only this header and the headers that it includes, and nothing else of kvstrata.
//
// The server calls a connector from the threads of its lanes, several at a time and without the
// GIL, so a connector may block. A call takes a batch and writes an outcome into each item: one bad
// item never fails its batch.
//
// Bytes. An item's `hold` keeps its bytes valid. A connector may touch the bytes as long as it has
// the hold or a copy of it, also after the call has returned (for a transfer that continues past a
// deadline). Dropping the last copy tells the server that the medium has finished with the bytes.
// The server checks loaded bytes against the record's checksums before anything reads them.
//
// `reason` is a string literal: a short word ("io", "capacity", ...), empty on success.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvstrata/digest.h"

namespace kvstrata {

// The number at the end is the version of everything in this header.
inline constexpr const char* connector_capsule_name = "kvstrata.Connector.5";

// The numeric values are part of the binding.
enum class Presence : std::uint8_t { kAbsent = 0, kPresent = 1, kUnknown = 2 };
enum class PutStatus : std::uint8_t { kStored = 0, kExists = 1, kThrottled = 2, kFailed = 3 };
enum class LoadStatus : std::uint8_t { kLoaded = 0, kAbsent = 1, kCorrupt = 2, kFailed = 3 };
enum class Quiesce : std::uint8_t { kDrain = 0, kNever = 1 };

using BytesHold = std::shared_ptr<void>;

struct ExistsItem {
  Digest key{};
  Presence presence = Presence::kUnknown;
  const char* reason = "";
};

struct PutItem {
  Digest key{};
  const std::uint8_t* bytes = nullptr;  // the whole record
  std::uint32_t length = 0;
  BytesHold hold;
  PutStatus status = PutStatus::kFailed;
  const char* reason = "internal";
  std::uint64_t copy = 0;  // for the connector's own use from put() to put_end()
};

struct LoadItem {
  Digest key{};
  std::uint8_t* bytes = nullptr;
  // Before the load the room at `bytes`, after kLoaded the number of bytes that the medium has
  // stored, which the connector sets. If they are more than there is room for, the outcome is
  // kFailed or kCorrupt.
  std::uint32_t length = 0;
  BytesHold hold;
  LoadStatus status = LoadStatus::kFailed;
  const char* reason = "internal";
  std::uint64_t copy = 0;  // set by the connector: which copy of the record it read
};

struct DeleteItem {
  Digest key{};
  bool removed = false;
};

struct ConnectorCapabilities {
  bool persistent = false;  // a stored record is durable and outlives this process
  bool shared = false;      // other processes put and delete records in the same medium
  bool can_delete = true;
  bool can_clear = false;
  bool lists = false;                    // list() is implemented
  bool wants_registered_memory = false;  // uses ConnectorContext::region
  // What ends a hanging call or transfer. kDrain: it ends by itself. kNever: only the end of its
  // process ends it; so an adapter host ends its own process, and in the server such a call keeps
  // its thread and its bytes.
  Quiesce quiesce = Quiesce::kDrain;
  // While ready() is true, exists() never blocks, so the server calls it on its event loop instead
  // of in a lane.
  bool exists_is_quick = false;
  std::uint32_t max_batch = 64;
  // A batch of puts or loads is cut into pieces of this many items, which run on several threads.
  std::uint32_t items_per_piece = 1;
};

struct ConnectorContext {
  std::string instance_id;
  // The mapping of the server's pool in this process, for devices that need registered memory.
  // Valid until close() has returned.
  std::uint8_t* region = nullptr;
  std::uint64_t region_bytes = 0;
};

struct ConnectorUsage {
  std::uint64_t used_bytes = 0;
  std::uint64_t capacity_bytes = 0;  // 0: unlimited
  std::uint64_t records = 0;
};

// A counter or gauge of a connector; the name is a string literal in snake_case.
struct ConnectorCount {
  const char* name;
  std::uint64_t value;
};

// A sentence for the server's log.
struct ConnectorNote {
  bool warning = false;
  std::string text;
};

class Connector {
 public:
  virtual ~Connector() = default;

  // Called once, before open().
  [[nodiscard]] virtual ConnectorCapabilities capabilities() const noexcept = 0;

  // Makes the medium ready; every call but capabilities() comes after it. Returns an empty string,
  // or a message that says what is wrong and what to change. A message that begins with '!' (which
  // is not shown) stops the start of the server: a setting is wrong, or the records there have
  // another format. After any other message the medium cannot be reached now, and another connector
  // is opened later.
  [[nodiscard]] virtual std::string open(const ConnectorContext& context) = 0;

  // False while exists() would have to wait (the medium is still being scanned): the server then
  // calls exists() in a lane. Called on the event loop.
  [[nodiscard]] virtual bool ready() noexcept { return true; }

  // Finds out which keys can be loaded. Never touches payloads.
  virtual void exists(std::span<ExistsItem> items) noexcept = 0;

  // Lists the stored records: appends up to `most` keys (up to 64 more if several keys share one
  // position of the cursor) and returns the cursor for the next call. A listing begins with cursor
  // 0 and ends when a call returns 0. A record that is stored during the whole listing is named at
  // least once; a record that is stored or deleted meanwhile may be named. A call may append
  // nothing. Called in the lane of lookups, only if capabilities().lists and while ready() is true;
  // must do no I/O and return quickly. REQUIRES: most > 0.
  [[nodiscard]] virtual std::uint64_t list(std::uint64_t /*cursor*/, std::size_t /*most*/,
                                           std::vector<Digest>* /*keys*/) noexcept {
    return 0;
  }

  // Stores the records of one piece of a batch.
  virtual void put(std::span<PutItem> piece) noexcept = 0;
  // Called with the whole batch after put() has returned for all its pieces; may still change
  // outcomes. For a medium that publishes the records of a batch together.
  virtual void put_end(std::span<PutItem> /*batch*/) noexcept {}

  // Reads whole records into the bytes of the items, and sets their lengths. After an outcome other
  // than kLoaded an item's bytes are undefined.
  virtual void load(std::span<LoadItem> piece) noexcept = 0;

  // Removes records. Sets `removed` of each item whose record was stored and has been removed.
  virtual void remove(std::span<DeleteItem> items) noexcept = 0;

  // Removes the copy that was loaded into `item` and found corrupt, so that the next put replaces
  // it. A connector that set item.copy recognises a newer copy by it, and keeps that one.
  virtual void remove_corrupt(const LoadItem& item) noexcept {
    DeleteItem bad{.key = item.key};
    remove(std::span(&bad, 1));
  }

  // Removes every record and returns their number. Only called if capabilities().can_clear.
  virtual std::uint64_t clear() noexcept { return 0; }

  [[nodiscard]] virtual ConnectorUsage usage() noexcept = 0;

  // Appends further counters, for status pages. Never blocks.
  virtual void counts(std::vector<ConnectorCount>* /*out*/) noexcept {}

  // Appends the keys that the connector evicted since the last call to stay within its own
  // capacity. Called after each batch.
  virtual void take_evicted(std::vector<Digest>* /*keys*/) noexcept {}

  // Appends notes for the operator about events since the last call, such as the path and the error
  // behind a reason "io". Called on the event loop after each batch, so it must not block; a
  // connector should keep only a few notes.
  virtual void take_notes(std::vector<ConnectorNote>* /*notes*/) noexcept {}

  // Frees the resources that open() acquired. The server calls it last, while no other call is
  // running.
  virtual void close() noexcept = 0;
};

}  // namespace kvstrata
