// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The disk log: records appended to segments, oldest segment out first (disk_format.h has the
// bytes). A connector for local disks on which nothing that was acknowledged is lost: what put()
// answers STORED has been synced, what remove() answers has a synced tombstone.
//
//   segment:  FREE -> ACTIVE (frames are appended) -> FULL -> RETIRING -> FREE, one generation on
//   frame:    placed -> written -> synced -> published (a record is in the index)
//
// Invariants
//  1. Frames get their place and sequence in one step, and are acknowledged in order: a sync counts
//     up to the last frame before which all are written. So what is found after a crash is whole up
//     to the first gap, and everything behind the gap was never acknowledged.
//  2. Every frame and every segment header tells up to which frame all were synced when it was
//     made. Only frames behind the last such mark are read whole at the next open. Before a file
//     goes, a segment that stays says so durably.
//  3. Segments retire in the order in which they were filled, so a tombstone outlives every record
//     that it speaks of.
//  4. Retiring: what is to stay is written again and synced; the others leave the index and are
//     reported; the header with the next generation is synced; only then is the segment free to be
//     overwritten.
//  5. A load pins its segment; a pinned segment is not overwritten.
//  6. Where neither a frame nor one to skip in its place can be written, nothing behind it is
//     acknowledged. The next put tries to write it again.
//  7. After a failed sync nothing is known about what was written since the one before, so the log
//     takes no more frames until it is opened again.
//  8. Lengths of all segments together never exceed capacity_bytes, unless it was lowered: then
//     open() drops the free ones, and after them the oldest. The file of a dropped segment counts
//     until it is removed; as long as it cannot be, no segment that was filled later is used again
//     (invariant 3).
//
// The index lies in memory; opening reads the tables of full segments, the frame headers of the
// others, and no payload but what invariant 2 leaves open. One log per folder, by a lock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "kvstrata/connector.h"
#include "kvstrata/disk_format.h"
#include "kvstrata/disk_index.h"
#include "kvstrata/files.h"

namespace kvstrata {

struct DiskOptions {
  std::string folder;  // absolute; made if need be
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;   // 0: by the capacity, see segment_bytes_for()
  std::uint64_t min_free_bytes = 0;  // no new segment where the file system would have less free
  bool direct = true;                // bypass the page cache where the file system can
  // Share of a segment that may be written again when it retires: what was loaded most recently.
  std::uint32_t reinsert_percent = 20;
  std::uint64_t scrub_bytes_per_s = 0;  // 0: no scrubber
  // Makes segments ready and scrubs in threads of the log's own. Without, put_end() makes them
  // ready and scrub() is called by whoever wants it.
  bool own_threads = true;
};

// At least sixteen segments, of at most 8 GiB each; 64 where they are not smaller than 64 MiB then.
constexpr std::uint64_t segment_bytes_for(std::uint64_t capacity_bytes) noexcept {
  const std::uint64_t most = capacity_bytes / 16;
  std::uint64_t bytes = capacity_bytes / 64;
  if (bytes < 64 << 20) bytes = most < 64 << 20 ? most : 64 << 20;
  if (bytes > std::uint64_t{8} << 30) bytes = std::uint64_t{8} << 30;
  return bytes / kFileBlockBytes * kFileBlockBytes;
}

// Below these a log cannot work, or not well.
inline constexpr std::uint64_t kMinSegmentBytes = 8 * kFileBlockBytes;
inline constexpr std::uint64_t kMinDiskBytes = 16 * 2 * kMinSegmentBytes;

class DiskLog final : public Connector {
 public:
  explicit DiskLog(DiskOptions options, FileLayer& files = posix_files());
  ~DiskLog() override;

  ConnectorCapabilities capabilities() const noexcept override;
  std::string open(const ConnectorContext& context) override;
  void exists(std::span<ExistsItem> items) noexcept override;
  void heads(std::span<HeadItem> items) noexcept override;
  std::uint64_t list(std::uint64_t cursor, std::size_t most,
                     std::vector<Digest>* keys) noexcept override;
  void put(std::span<PutItem> piece) noexcept override;
  void put_end(std::span<PutItem> batch) noexcept override;
  void load(std::span<LoadItem> piece) noexcept override;
  void remove(std::span<DeleteItem> items) noexcept override;
  void remove_corrupt(const LoadItem& item) noexcept override;
  std::uint64_t clear() noexcept override;
  ConnectorUsage usage() noexcept override;
  void counts(std::vector<ConnectorCount>* out) noexcept override;
  void take_evicted(std::vector<Digest>* keys) noexcept override;
  void take_notes(std::vector<ConnectorNote>* notes) noexcept override;
  void close() noexcept override;

  // Checks records from where the last call stopped, until so many bytes are read or all records
  // were visited once; bad ones are removed. Returns the bytes read.
  std::uint64_t scrub(std::uint64_t bytes) noexcept;

  // Longest record that fits.
  [[nodiscard]] std::uint64_t max_record_bytes() const noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // A record's frame in a segment, as its key's hash and its place: enough to find it in the index.
  struct Slot {
    std::uint32_t hash_low, hash_high;
    std::uint32_t block;
  };

  struct Segment {
    std::uint32_t number = 0;
    std::uint64_t generation = 1;
    std::uint64_t length = 0;
    std::string path;
    std::shared_ptr<File> file;
    std::uint64_t end = kSegmentHeaderBytes;  // where the next frame goes
    FrameName last;                           // of this generation; zeros: no frame
    std::vector<Slot> slots;                  // of what was published here
    std::vector<TableEntry> table;            // of all frames; empty once it is written
    std::uint32_t pins = 0;
    bool dirty = false;         // something written is not synced
    bool tabled = false;        // its table is in the file
    bool table_failed = false;  // and is not tried again for its own sake
    bool retiring = false;
  };

  // The file of a dropped segment that could not be removed. It counts as used until it is gone.
  struct Leftover {
    std::string path;
    std::uint32_t number = 0;
    std::uint64_t length = 0;
    bool has_frames = false;  // its removal has to be durable before anything behind it goes
    bool unlinked = false;
    bool told = false;
  };

  // A frame that has its place and is not published yet.
  struct Placed {
    std::shared_ptr<File> file;
    FrameHeader header;
    std::uint32_t segment = 0;
    std::uint32_t block = 0;
    std::size_t table_at = 0;  // its first entry in the segment's table
  };

  struct HashOfKey {
    std::size_t operator()(const Digest& key) const noexcept {
      std::size_t bits;
      std::memcpy(&bits, key.data(), sizeof(bits));
      return bits;
    }
  };

  struct Removal {
    Digest key{};
    std::uint64_t copy = 0;  // 0: whatever is there; else only the copy with this sequence
    bool removed = false;
  };

  // Somebody should read this; what comes while sixteen wait is dropped.
  void note(bool warning, std::string text);

  // -- disk_log.cpp: frames
  Status make_room(Lock& lock, std::uint64_t frame_bytes, std::size_t entries,
                   bool retiring = false);
  bool fits(const Segment& segment, std::uint64_t frame_bytes, std::size_t entries) const noexcept;
  Placed place_frame(FrameHeader header);
  Status write_frame(const Placed& placed, const std::uint8_t* record) noexcept;
  void written(Lock& lock, const Placed& placed, Status status) noexcept;
  Status append(Lock& lock, FrameHeader header);
  Status fill_holes(Lock& lock) noexcept;
  bool mark(Lock& lock) noexcept;
  Status commit(Lock& lock, std::uint64_t sequence) noexcept;
  std::uint64_t written_up_to() const noexcept;
  void publish(const Placed& placed);
  bool read_frame(File& file, const DiskPlace& place, const Digest& key, std::uint64_t generation,
                  std::uint8_t* out, Status* status) noexcept;
  static std::optional<FrameHeader> frame_of(const DiskBlock& block, const DiskPlace& place,
                                             const Digest& key, std::uint64_t generation);
  Segment& segment_at(std::uint32_t number) noexcept { return *segments_.at(number); }
  bool is_there(const Removal& removal) noexcept;
  void remove_copies(std::span<Removal> removals) noexcept;
  void unpin(Segment& segment) noexcept;
  Status refused() const noexcept;

  // -- disk_retire.cpp: segments come and go
  void work();
  bool work_is_due() const noexcept;
  std::size_t reserved_segments() const noexcept;
  Status maintain(Lock& lock) noexcept;
  void write_tables(Lock& lock) noexcept;
  Status write_table(Lock& lock, Segment& segment) noexcept;
  Status next_segment(Lock& lock) noexcept;
  Status create_segment(Lock& lock) noexcept;
  std::uint32_t unused_number() const noexcept;
  Status retire(Lock& lock, Segment& segment) noexcept;
  void reinsert(Lock& lock, Segment& segment) noexcept;
  void drop_records(Lock& lock, Segment& segment) noexcept;
  Status drop_segment(Lock& lock, Segment& segment) noexcept;
  void leave_file(const Segment& segment, std::uint64_t length_bytes) noexcept;
  Status remove_leftovers(Lock& lock) noexcept;
  Status say_synced(Lock& lock) noexcept;
  Status renew(Lock& lock, Segment& segment) noexcept;
  void scrub_always();

  // -- disk_open.cpp: what is there
  struct Found;
  std::string recover();
  std::string read_segment(const FolderEntry& entry, std::vector<Found>* found);
  Status read_chain(Found* found);
  std::string find_end(std::vector<Found>* found, std::vector<Segment*>* cut);
  static Status cut_log(std::span<Segment* const> cut) noexcept;
  static std::string unreadable(const Segment& segment, const Status& status);
  Status settle(std::vector<Found>* found);
  void fill_index(const std::vector<Found>& found);
  static Status look_at_payload(Segment& segment, std::uint32_t block, const FrameHeader& header,
                                bool* whole);
  Status open_file(const std::string& path, FileMode mode, std::unique_ptr<File>* out) noexcept;

  DiskOptions options_;
  FileLayer& files_;
  std::unique_ptr<FileLock> folder_lock_;
  std::uint64_t run_ = 0;
  bool direct_ = true;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // frames written, synced; segments ready, unpinned
  std::condition_variable due_;      // for work()
  DiskIndex index_;
  std::uint64_t live_bytes_ = 0;                                // of the frames in the index
  std::map<std::uint32_t, std::unique_ptr<Segment>> segments_;  // by number
  // Numbers of files that have a segment's name and are not segments of this log, or no more.
  std::set<std::uint32_t> taken_numbers_;
  std::deque<Leftover> leftovers_;  // in the order in which they have to go
  std::deque<std::uint32_t> full_;  // oldest first
  std::deque<std::uint32_t> free_;
  Segment* active_ = nullptr;
  std::uint64_t total_bytes_ = 0;  // of all segments, foreign files with such names included
  std::uint64_t sequence_ = 0;     // last one given out
  std::uint64_t synced_ = 0;
  std::set<std::uint64_t> writing_;  // placed and not written
  // Frames to skip that could not be written either, for want of space say. They stay in writing_:
  // nothing behind them is acknowledged until they are written.
  std::vector<Placed> holes_;
  Status hole_error_;
  std::map<std::uint64_t, Placed> puts_;  // by sequence, from put() to put_end()
  // Keys of frames that are placed and not published, and the last tombstone that names them.
  std::unordered_map<Digest, std::uint64_t, HashOfKey> putting_;
  std::vector<Digest> evicted_;
  std::vector<ConnectorNote> notes_;
  std::uint32_t loads_ = 0;
  bool unmarked_ = false;  // there may be records behind the last mark (invariant 2)
  bool syncing_ = false;
  bool maintaining_ = false;
  bool maintenance_failed_ = false;  // not to be tried again before somebody asks for room
  bool read_only_ = false;
  bool stopping_ = false;
  std::uint32_t scrub_segment_ = 0;
  std::size_t scrub_slot_ = 0;

  struct {
    std::uint64_t put_bytes, written_bytes, reinserted_records, reinserted_bytes, evicted_records,
        deleted_records, corrupt_records, scrubbed_bytes, syncs, retired_segments,
        unreadable_segments, loaded_records;
  } counts_{};

  std::vector<std::thread> threads_;
};

}  // namespace kvstrata
