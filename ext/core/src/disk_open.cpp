// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Opening a disk log: which frames are there, where the log ends, what is in the index.
//
//   1. Every segment's header is read; one of another version ends it all, before anything changes.
//   2. The table of a full segment, or else its frames one after the other.
//   3. Frames behind the last mark ("all are synced up to here") count as far as there is no gap
//      and their records are whole. The rest was never acknowledged and is made unreachable. Where
//      a read fails the log is not opened, and nothing is changed.
//   4. What counts is synced (a process that died may have left it in a cache), then indexed.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

#include "kvstrata/disk_log.h"
#include "kvstrata/record.h"

namespace kvstrata {

namespace {

// A read that fails at open is tried so often.
constexpr int kReadTries = 3;

// An error that says nothing about what is on the medium may be gone at the next try.
Status read_patiently(File& file, std::span<const ReadPart> parts, std::uint64_t offset) noexcept {
  Status status;
  for (int tries = 0; tries < kReadTries; ++tries) {
    status = file.read(parts, offset);
    if (status.ok() || status.code() == StatusCode::kOutOfRange) break;
  }
  return status;
}

constexpr char kLockName[] = "/.kvstrata.lock";

std::uint64_t random_run() {
  std::random_device random;
  const std::uint64_t bits = std::uint64_t{random()} << 32 | random();
  return bits | 1;  // 0 means: no frame
}

// The number in a segment's name, "0000002a.seg"; nothing for other names.
std::optional<std::uint32_t> segment_number(const std::string& name) {
  if (name.size() != 12 || name.compare(8, 4, ".seg") != 0) return std::nullopt;
  if (name.find_first_not_of("0123456789abcdef") != 8) return std::nullopt;
  return static_cast<std::uint32_t>(std::strtoul(name.c_str(), nullptr, 16));
}

}  // namespace

// One segment as it was found.
struct DiskLog::Found {
  struct Frame {
    FrameHeader header;
    std::uint32_t block;
  };
  Segment* segment = nullptr;
  std::vector<Frame> chain;         // where there is no table
  std::vector<TableEntry> entries;  // of the table
};

Status DiskLog::open_file(const std::string& path, FileMode mode,
                          std::unique_ptr<File>* out) noexcept {
  if (direct_) {
    const Status status = files_.open(path, mode, true, out);
    if (status.code() != StatusCode::kUnsupported) return status;
    direct_ = false;
  }
  return files_.open(path, mode, false, out);
}

std::string DiskLog::open(const ConnectorContext& context) {
  const std::string wrong = "base_path: '" + options_.folder + "' cannot be used: ";
  Status status = make_folders(files_, options_.folder);
  if (!status.ok())
    return wrong + describe_file_error(options_.folder, status) +
           "; give a directory that this user may write";
  std::string holder;
  status = files_.lock(options_.folder + kLockName, &folder_lock_, &holder);
  if (status.code() == StatusCode::kBusy)
    return "base_path: '" + options_.folder + "' belongs to another running server (" +
           (holder.empty() ? "unknown" : holder) + "); give each server a directory of its own";
  if (!status.ok())
    return wrong + describe_file_error(options_.folder + kLockName, status) +
           "; give a directory that this user may write and lock";
  folder_lock_->note("pid " + std::to_string(::getpid()) + ", instance " + context.instance_id);
  run_ = random_run();
  std::string failed = recover();
  if (!failed.empty()) {
    segments_.clear();
    active_ = nullptr;
    folder_lock_.reset();
    return failed;
  }
  if (options_.own_threads) {
    threads_.emplace_back([this] { work(); });
    if (options_.scrub_bytes_per_s > 0) threads_.emplace_back([this] { scrub_always(); });
  }
  return "";
}

std::string DiskLog::recover() {
  const std::string wrong = "base_path: '" + options_.folder + "' cannot be read: ";
  std::vector<FolderEntry> entries;
  Status status = files_.list(options_.folder, &entries);
  if (!status.ok()) return wrong + describe_file_error(options_.folder, status);
  std::vector<Found> found;
  for (const FolderEntry& entry : entries) {
    std::string failed = read_segment(entry, &found);
    if (!failed.empty()) return failed;
  }
  for (Found& each : found) {
    status = read_chain(&each);
    if (!status.ok()) return unreadable(*each.segment, status);
  }
  std::vector<Segment*> cut;
  std::string failed = find_end(&found, &cut);
  if (!failed.empty()) return failed;
  status = cut_log(cut);
  if (status.ok()) status = settle(&found);
  if (!status.ok()) return wrong + describe_file_error(options_.folder, status);
  fill_index(found);
  note(false, options_.folder + " holds " + std::to_string(index_.size()) + " records, " +
                  std::to_string(live_bytes_) + " bytes");
  // A capacity that was lowered: what is free goes, then the oldest segments.
  Lock lock(mutex_);
  maintaining_ = true;
  if (total_bytes_ > options_.capacity_bytes) {
    unmarked_ = true;  // what says it now may be a file that goes, or not be synced
    while (status.ok() && total_bytes_ > options_.capacity_bytes && !free_.empty()) {
      Segment& segment = segment_at(free_.back());
      free_.pop_back();
      status = drop_segment(lock, segment);
    }
    while (status.ok() && total_bytes_ > options_.capacity_bytes && !full_.empty())
      status = retire(lock, segment_at(full_.front()));
    // The rest goes when that file can be removed: the next put that needs a segment tries.
    if (!leftovers_.empty()) status = Status();
  }
  maintaining_ = false;
  if (!status.ok()) return wrong + describe_file_error(options_.folder, status);
  return "";
}

// The header, and the table if there is one. Changes nothing on the medium.
std::string DiskLog::read_segment(const FolderEntry& entry, std::vector<Found>* found) {
  const std::optional<std::uint32_t> number = segment_number(entry.name);
  if (!number.has_value()) return "";
  if (!entry.is_file) {
    taken_numbers_.insert(*number);
    return "";
  }
  auto segment = std::make_unique<Segment>();
  segment->number = *number;
  segment->path = options_.folder + "/" + entry.name;
  std::unique_ptr<File> file;
  Status status = open_file(segment->path, FileMode::kReadWrite, &file);
  std::uint64_t length = 0;
  if (status.ok()) status = file->length(&length);
  const std::string wrong = "base_path: " + segment->path + " cannot be read: ";
  if (!status.ok())
    return wrong + describe_file_error(segment->path, status) + "; repair or remove this file";
  segment->file = std::move(file);
  DiskBlock block;
  const ReadPart part[] = {{block.bytes.data(), kFileBlockBytes}};
  SegmentHeader header;
  BlockState state = BlockState::kEmpty;
  if (length >= kSegmentHeaderBytes) {
    status = read_patiently(*segment->file, part, 0);
    if (!status.ok())
      return wrong + describe_file_error(segment->path, status) + "; repair or remove this file";
    state = decode(block, &header);
  }
  if (state == BlockState::kOther)
    return "base_path: " + segment->path +
           " was written by another version of kvstrata; start that version, or give another "
           "directory (nothing was changed)";
  const bool sound = state == BlockState::kGood && header.segment == *number &&
                     header.length % kFileBlockBytes == 0 && header.length >= kMinSegmentBytes &&
                     header.generation > 0;
  if (state != BlockState::kEmpty && !sound) {
    // Not ours, or damaged beyond use: it stays, and counts as used.
    total_bytes_ += length;
    taken_numbers_.insert(*number);
    ++counts_.unreadable_segments;
    note(true, segment->path + " has no sound header; it is left alone and counts as used");
    return "";
  }
  segment->length = header.length;
  if (!sound || length < header.length) {
    // Was being made when everything ended: no frame in it was ever synced.
    segment->length = 0;
  } else {
    segment->generation = header.generation;
    synced_ = std::max(synced_, header.synced);
    total_bytes_ += segment->length;
  }
  found->push_back(Found{.segment = segment.get(), .chain = {}, .entries = {}});
  segments_[*number] = std::move(segment);
  return "";
}

// The table, or else the frames one after the other.
Status DiskLog::read_chain(Found* found) {
  Segment& segment = *found->segment;
  if (segment.length == 0) return Status();
  DiskBlock block;
  const ReadPart part[] = {{block.bytes.data(), kFileBlockBytes}};
  KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, part, segment.length - kFileBlockBytes));
  const auto bytes = table_length(block, segment.number, segment.generation);
  if (bytes.has_value() && *bytes <= segment.length - kSegmentHeaderBytes) {
    std::vector<DiskBlock> blocks(*bytes / kFileBlockBytes);
    const ReadPart parts[] = {{blocks.data(), *bytes}};
    KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, parts, segment.length - *bytes));
    if (auto table = decode_table(blocks)) {
      found->entries = std::move(table->entries);
      segment.last = table->last;
      segment.end = table->end;
      segment.tabled = true;
      synced_ = std::max(synced_, table->last.sequence);
      return Status();
    }
  }
  while (segment.end + kFrameHeaderBytes <= segment.length) {
    KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, part, segment.end));
    std::optional<FrameHeader> header = decode_frame(block);
    if (!header.has_value() || header->segment != segment.number ||
        header->generation != segment.generation || header->previous != segment.last ||
        header->record_bytes > segment.length - segment.end - kFrameHeaderBytes)
      break;
    synced_ = std::max(synced_, header->synced);
    const std::uint64_t frame_bytes = header->frame_bytes();
    segment.last = header->name;
    found->chain.push_back(
        Found::Frame{.header = std::move(*header),
                     .block = static_cast<std::uint32_t>(segment.end / kFileBlockBytes)});
    segment.end += frame_bytes;
  }
  return Status();
}

// Whether the record of a frame was written to its end. An error: that cannot be told now.
Status DiskLog::look_at_payload(Segment& segment, std::uint32_t block, const FrameHeader& header,
                                bool* whole) {
  *whole = header.kind != FrameKind::kRecord;
  if (*whole) return Status();
  const std::uint64_t bytes = whole_blocks(header.record_bytes);
  std::vector<DiskBlock> blocks(bytes / kFileBlockBytes);
  const ReadPart parts[] = {{blocks.data(), bytes}};
  const std::uint64_t offset = std::uint64_t{block} * kFileBlockBytes + kFrameHeaderBytes;
  const Status status = read_patiently(*segment.file, parts, offset);
  if (status.code() == StatusCode::kOutOfRange) return Status();  // the file ends within it
  KVSTRATA_RETURN_IF_ERROR(status);
  *whole = head_crc_of(blocks.data(), header.record_bytes) == header.head_crc &&
           verify_stored_record(blocks.data(), header.record_bytes, &header.key).ok();
  return Status();
}

// Records that were synced cannot be told from records that were never acknowledged as long as some
// cannot be read.
std::string DiskLog::unreadable(const Segment& segment, const Status& status) {
  return "base_path: " + describe_file_error(segment.path, status) +
         "; the log is not opened, because records that were acknowledged would be lost, and "
         "nothing was changed; repair the medium and start again, or move this file away to go on "
         "without its records";
}

// Finds the last frame that counts and ends the chains there, in memory. Sets sequence_ and
// synced_. `cut` gets the segments that have a frame behind it. Changes nothing on the medium.
std::string DiskLog::find_end(std::vector<Found>* found, std::vector<Segment*>* cut) {
  struct Loose {
    std::uint64_t sequence;
    Found* in;
    std::size_t at;
  };
  std::vector<Loose> loose;
  for (Found& each : *found) {
    for (std::size_t at = 0; at < each.chain.size(); ++at) {
      const std::uint64_t sequence = each.chain[at].header.name.sequence;
      if (sequence > synced_) loose.push_back({sequence, &each, at});
    }
  }
  std::sort(loose.begin(), loose.end(),
            [](const Loose& a, const Loose& b) { return a.sequence < b.sequence; });
  std::uint64_t last = synced_;
  for (const Loose& frame : loose) {
    const Found::Frame& at = frame.in->chain[frame.at];
    if (frame.sequence != last + 1) break;
    bool whole = false;
    const Status status = look_at_payload(*frame.in->segment, at.block, at.header, &whole);
    if (!status.ok()) return unreadable(*frame.in->segment, status);
    if (!whole) break;
    last = frame.sequence;
    unmarked_ = unmarked_ || at.header.kind != FrameKind::kSkip;
  }
  sequence_ = synced_ = last;
  for (Found& each : *found) {
    const auto end = std::find_if(each.chain.begin(), each.chain.end(), [&](const auto& frame) {
      return frame.header.name.sequence > last;
    });
    if (end == each.chain.end()) continue;
    Segment& segment = *each.segment;
    segment.end = std::uint64_t{end->block} * kFileBlockBytes;
    each.chain.erase(end, each.chain.end());
    segment.last = each.chain.empty() ? FrameName{} : each.chain.back().header.name;
    cut->push_back(&segment);
  }
  return "";
}

// Later frames would one day make it look as if the first one that does not count had been synced:
// it goes.
Status DiskLog::cut_log(std::span<Segment* const> cut) noexcept {
  for (Segment* const segment : cut) {
    const DiskBlock zeros;
    const WritePart parts[] = {{zeros.bytes.data(), kFileBlockBytes}};
    KVSTRATA_RETURN_IF_ERROR(segment->file->write(parts, segment->end));
  }
  return Status();
}

// Makes what counts durable and gives every segment its state.
Status DiskLog::settle(std::vector<Found>* found) {
  for (const Found& each : *found) {
    Segment& segment = *each.segment;
    if (!segment.tabled) KVSTRATA_RETURN_IF_ERROR(segment.file->sync());
    // A file without a frame may be one whose name was never synced. If it comes back after all, it
    // goes again then; what was cut off, now or by a process that died over it, is gone for good.
    if (segment.generation == 1 && segment.last == FrameName{}) {
      std::uint64_t length = segment.length;
      if (length == 0) KVSTRATA_RETURN_IF_ERROR(segment.file->length(&length));
      total_bytes_ -= segment.length;
      leave_file(segment, length);
      segment.length = 0;
    }
  }
  Lock lock(mutex_);
  (void)remove_leftovers(lock);  // else when a put needs the room
  std::vector<Segment*> with_frames;
  for (Found& each : *found) {
    Segment* const segment = each.segment;
    if (segment->length == 0) {
      segments_.erase(segment->number);
      each.segment = nullptr;
    } else if (segment->last == FrameName{}) {
      free_.push_back(segment->number);
    } else {
      with_frames.push_back(segment);
    }
  }
  std::sort(with_frames.begin(), with_frames.end(),
            [](const Segment* a, const Segment* b) { return a->last.sequence < b->last.sequence; });
  if (!with_frames.empty() && !with_frames.back()->tabled) {
    active_ = with_frames.back();
    with_frames.pop_back();
  }
  for (const Segment* const segment : with_frames)
    full_.push_back(segment->number);
  return Status();
}

void DiskLog::fill_index(const std::vector<Found>& found) {
  std::uint64_t cleared = 0;
  std::unordered_map<std::string, std::uint64_t> tombstones;
  const auto for_each_entry = [&](auto&& visit) {
    for (const Found& each : found) {
      if (each.segment == nullptr) continue;
      for (const TableEntry& entry : each.segment->tabled ? each.entries : each.segment->table)
        visit(*each.segment, entry);
    }
  };
  for (const Found& each : found) {
    if (each.segment == nullptr) continue;
    for (const Found::Frame& frame : each.chain) {
      TableEntry entry{.key = frame.header.key,
                       .sequence = frame.header.name.sequence,
                       .block = frame.block,
                       .record_bytes = static_cast<std::uint32_t>(frame.header.record_bytes),
                       .kind = frame.header.kind};
      if (frame.header.kind != FrameKind::kTombstones) each.segment->table.push_back(entry);
      for (const Digest& key : frame.header.tombstones) {
        entry.key = key;
        each.segment->table.push_back(entry);
      }
    }
  }
  const auto text = [](const Digest& key) {
    return std::string(reinterpret_cast<const char*>(key.data()), key.size());
  };
  for_each_entry([&](Segment&, const TableEntry& entry) {
    if (entry.kind == FrameKind::kClear) cleared = std::max(cleared, entry.sequence);
    if (entry.kind == FrameKind::kTombstones) {
      std::uint64_t& last = tombstones[text(entry.key)];
      last = std::max(last, entry.sequence);
    }
  });
  for_each_entry([&](Segment& segment, const TableEntry& entry) {
    if (entry.kind != FrameKind::kRecord || entry.sequence <= cleared) return;
    if (!tombstones.empty()) {
      const auto tombstone = tombstones.find(text(entry.key));
      if (tombstone != tombstones.end() && tombstone->second > entry.sequence) return;
    }
    Slot slot{.hash_low = 0, .hash_high = 0, .block = entry.block};
    std::memcpy(&slot.hash_low, entry.key.data(), 4);
    std::memcpy(&slot.hash_high, entry.key.data() + 4, 4);
    segment.slots.push_back(slot);
    const std::uint64_t bytes = kFrameHeaderBytes + whole_blocks(entry.record_bytes);
    if (const DiskPlace* const other = index_.find(entry.key)) {
      if (other->sequence > entry.sequence) return;
      live_bytes_ -= kFrameHeaderBytes + whole_blocks(other->record_bytes);
    }
    index_.set(entry.key, DiskPlace{.sequence = entry.sequence,
                                    .segment = segment.number,
                                    .block = entry.block,
                                    .record_bytes = entry.record_bytes,
                                    .loaded = 0});
    live_bytes_ += bytes;
  });
}

}  // namespace kvstrata
