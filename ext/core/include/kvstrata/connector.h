// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A storage medium in C++: derive from Connector, make it, hand it to Python in a capsule
// (connector_capsule_name), and kvstrata.storage.native_adapter.NativeAdapter is the storage
// adapter around it. This header and those it includes are all that an extension outside kvstrata
// needs.
//
// The server calls a connector from the threads of its lanes, several at a time, without the GIL,
// so blocking is the connector's own business. All calls are batches; outcomes are written into the
// items, each by itself: one bad item never fails its batch.
//
// Bytes. An item's `hold` keeps its bytes: they may be touched until it is reset, by whoever has a
// copy of it, also after the call has returned (a transfer that goes on past a deadline). Resetting
// it, or letting the item end, says that the medium has finished with the bytes. What was loaded is
// checked against the record's checksums outside, before anybody sees it.
//
// `reason` is a string literal: a short word (full, io, throttled, ...), empty where all is well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvstrata/digest.h"

namespace kvstrata {

// The name names the version of everything in this header.
inline constexpr const char* connector_capsule_name = "kvstrata.Connector.4";

// The numbers of these are part of the binding.
enum class Presence : std::uint8_t { kAbsent = 0, kPresent = 1, kUnknown = 2 };
enum class PutStatus : std::uint8_t { kStored = 0, kExists = 1, kThrottled = 2, kFailed = 3 };
enum class LoadStatus : std::uint8_t { kLoaded = 0, kAbsent = 1, kCorrupt = 2, kFailed = 3 };
enum class Quiesce : std::uint8_t { kDrain = 0, kNever = 1 };

using BytesHold = std::shared_ptr<void>;

struct ExistsItem {
  Digest key{};
  Presence presence = Presence::kUnknown;
  std::uint32_t record_bytes = 0;  // of the whole record, where present
  const char* reason = "";
};

// The first bytes of a stored record: both of its headers.
inline constexpr std::uint32_t kHeadBytes = 512;

struct HeadItem {
  Digest key{};
  std::uint32_t length =
      0;  // bytes that were read; less than kHeadBytes: there are no more, or none
  std::uint8_t bytes[kHeadBytes] = {};
};

struct PutItem {
  Digest key{};
  const std::uint8_t* bytes = nullptr;  // the whole record, only read
  std::uint32_t length = 0;
  BytesHold hold;
  PutStatus status = PutStatus::kFailed;
  const char* reason = "internal";
  std::uint64_t copy = 0;  // the connector's, from put() to put_end()
};

struct LoadItem {
  Digest key{};
  std::uint8_t* bytes = nullptr;
  std::uint32_t length = 0;  // of the whole record; one of another length is kCorrupt
  BytesHold hold;
  LoadStatus status = LoadStatus::kFailed;
  const char* reason = "internal";
  std::uint64_t copy = 0;  // the connector's: which of the record's copies it read
};

struct DeleteItem {
  Digest key{};
  bool removed = false;
};

struct ConnectorCapabilities {
  bool persistent = false;  // STORED means durable, and outlives this process
  bool shared = false;      // others put and delete there too
  bool can_delete = true;
  bool can_clear = false;
  bool has_heads = false;                // heads() tells; records may be encoded only then
  bool lists = false;                    // list() tells what is there
  bool wants_registered_memory = false;  // uses ConnectorContext::region
  // What ends a call or a transfer: it does so by itself, or only the end of its process does. Of
  // the latter an adapter host ends the process; in the server it keeps its thread and its bytes.
  Quiesce quiesce = Quiesce::kDrain;
  // While ready(), exists() never blocks: it is called on the server's event loop, in no lane.
  bool exists_is_quick = false;
  std::uint32_t max_batch = 64;
  // Items of a batch that one thread puts or loads; the pieces of a batch run side by side.
  std::uint32_t items_per_piece = 1;
};

struct ConnectorContext {
  std::string instance_id;
  // The server's pool in this process, to register with devices; valid until close() has returned.
  std::uint8_t* region = nullptr;
  std::uint64_t region_bytes = 0;
};

struct ConnectorUsage {
  std::uint64_t used_bytes = 0;
  std::uint64_t capacity_bytes = 0;  // 0: unlimited
  std::uint64_t records = 0;
};

// What a connector counts, ever or now; the name is a string literal in snake_case.
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

  // Asked once, before open().
  [[nodiscard]] virtual ConnectorCapabilities capabilities() const noexcept = 0;

  // Makes the medium ready; nothing else is called before. Returns what is wrong and what to
  // change, or an empty string.
  [[nodiscard]] virtual std::string open(const ConnectorContext& context) = 0;

  // False: exists() would wait for something (the medium is being read in), so it is called in a
  // lane. Asked on the event loop.
  [[nodiscard]] virtual bool ready() noexcept { return true; }

  // Which keys can be loaded and how long their records are. Never touches payloads.
  virtual void exists(std::span<ExistsItem> items) noexcept = 0;

  // The first kHeadBytes of stored records: what tells the length of an encoded one. Only called
  // where capabilities().has_heads, in the lane of lookups.
  virtual void heads(std::span<HeadItem> /*items*/) noexcept {}

  // Names the records that are there: appends `most` keys, or a few more that cannot be told apart
  // (64 at most), and returns where to go on; `cursor` 0 is the beginning, and 0 is answered after
  // the last. A record that is there from the first call to the last is named at least once. What
  // comes or goes meanwhile may be named; a call may name nothing. Only called where
  // capabilities().lists, while ready(), in the lane of lookups: no I/O, and little at a time.
  // REQUIRES: most > 0.
  [[nodiscard]] virtual std::uint64_t list(std::uint64_t /*cursor*/, std::size_t /*most*/,
                                           std::vector<Digest>* /*keys*/) noexcept {
    return 0;
  }

  // Stores some items of a batch.
  virtual void put(std::span<PutItem> piece) noexcept = 0;
  // After all pieces of the batch: may still change outcomes (to publish once what they wrote).
  virtual void put_end(std::span<PutItem> /*batch*/) noexcept {}

  // Reads whole records.
  virtual void load(std::span<LoadItem> piece) noexcept = 0;

  virtual void remove(std::span<DeleteItem> items) noexcept = 0;

  // Removes the copy that was loaded into `item` and found corrupt, so that the next put heals it.
  // One that was put since then may be told from it by item.copy, and stays.
  virtual void remove_corrupt(const LoadItem& item) noexcept {
    DeleteItem bad{.key = item.key};
    remove(std::span(&bad, 1));
  }

  // Removes every record; returns how many. Only called where capabilities().can_clear.
  virtual std::uint64_t clear() noexcept { return 0; }

  [[nodiscard]] virtual ConnectorUsage usage() noexcept = 0;

  // What else it counts, for status pages. Never blocks.
  virtual void counts(std::vector<ConnectorCount>* /*out*/) noexcept {}

  // Keys that the connector's own cap dropped since the last call. Asked after each batch.
  virtual void take_evicted(std::vector<Digest>* /*keys*/) noexcept {}

  // What happened since the last call that somebody should read (the path and the error behind an
  // `io`, say), appended. Asked on the event loop after each batch: keep few, do not block.
  virtual void take_notes(std::vector<ConnectorNote>* /*notes*/) noexcept {}

  // Nothing runs and nothing is called after. What open() made is freed here.
  virtual void close() noexcept = 0;
};

}  // namespace kvstrata
