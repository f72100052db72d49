// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/recover.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/key_hash.h"
#include "disk/frames.h"
#include "record/record.h"

namespace kvstrata::disk {

namespace {

// How many times a read is tried.
constexpr int kReadTries = 3;

// Reads, and tries again after an error, which may be transient. kOutOfRange is not transient: the
// file ends there.
Status read_patiently(File& file, std::span<const ReadPart> parts, std::uint64_t offset) noexcept {
  Status status;
  for (int tries = 0; tries < kReadTries; ++tries) {
    status = file.read(parts, offset);
    if (status.ok() || status.code() == StatusCode::kOutOfRange) break;
  }
  return status;
}

// The number in a segment's name, "0000002a.seg"; nothing for other names.
std::optional<std::uint32_t> segment_number(const std::string& name) {
  if (name.size() != 12 || name.compare(8, 4, ".seg") != 0) return std::nullopt;
  if (name.find_first_not_of("0123456789abcdef") != 8) return std::nullopt;
  return static_cast<std::uint32_t>(std::strtoul(name.c_str(), nullptr, 16));
}

// Why the open fails: while a record cannot be read, it is unknown whether the records behind it
// were acknowledged.
std::string unreadable(const Segment& segment, const Status& status) {
  return "base_path: " + describe_file_error(segment.path, status) +
         "; the log is not opened, because records that were acknowledged would be lost, and "
         "nothing was changed; repair the medium and start again, or move this file away to go on "
         "without its records";
}

// Sets `*whole` to true if the record of a frame was written to its end, otherwise to false. An
// error: the medium failed to read it.
Status look_at_payload(const Segment& segment, std::uint32_t block, const FrameHeader& header,
                       bool* whole) {
  *whole = header.kind != FrameKind::kRecord;
  if (*whole) return Status();
  const std::uint64_t bytes = whole_blocks(header.record_bytes);
  std::vector<FileBlock> blocks(bytes / kFileBlockBytes);
  const ReadPart parts[] = {{blocks.data(), bytes}};
  const std::uint64_t offset = std::uint64_t{block} * kFileBlockBytes + kFrameHeaderBytes;
  const Status status = read_patiently(*segment.file, parts, offset);
  if (status.code() == StatusCode::kOutOfRange) return Status();  // the file ends within it
  KVSTRATA_RETURN_IF_ERROR(status);
  *whole = head_crc_of(blocks.data(), header.record_bytes) == header.head_crc &&
           verify_stored_record(blocks.data(), header.record_bytes, &header.key).ok();
  return Status();
}

class Recovery {
 public:
  Recovery(Shared& shared, Recovered* out) : shared_(shared), out_(out) {}

  std::string run();

 private:
  // A segment as the scan of the folder found it.
  struct Found {
    struct Frame {
      FrameHeader header;
      std::uint32_t block;
    };
    std::unique_ptr<Segment> segment;
    bool listed = false;
    std::vector<Frame> chain;         // if not listed
    std::vector<TableEntry> entries;  // of the table, if listed
  };

  std::string read_segment(const FolderEntry& entry);
  Status read_chain(Found& found);
  std::string find_end();
  Status cut_log() noexcept;
  Status settle();

  Shared& shared_;
  Recovered* out_;
  std::vector<Found> found_;
  std::uint64_t synced_ = 0;   // the highest mark
  std::vector<Segment*> cut_;  // segments that have a frame behind the last one that counts
};

std::string Recovery::run() {
  const std::string& folder = shared_.options.folder;
  const std::string wrong = "base_path: '" + folder + "' cannot be read: ";
  std::vector<FolderEntry> entries;
  Status status = shared_.files.list(folder, &entries);
  if (!status.ok()) return wrong + describe_file_error(folder, status);
  for (const FolderEntry& entry : entries) {
    std::string failed = read_segment(entry);
    if (!failed.empty()) return failed;
  }
  for (Found& found : found_) {
    status = read_chain(found);
    if (!status.ok()) return unreadable(*found.segment, status);
  }
  std::string failed = find_end();
  if (!failed.empty()) return failed;
  status = cut_log();
  if (status.ok()) status = settle();
  return status.ok() ? "" : wrong + describe_file_error(folder, status);
}

// Reads the segment's header. Changes nothing on the medium.
std::string Recovery::read_segment(const FolderEntry& entry) {
  const std::optional<std::uint32_t> number = segment_number(entry.name);
  if (!number.has_value()) return "";
  if (!entry.is_file) {
    out_->foreign.push_back({*number, 0});
    return "";
  }
  auto segment = std::make_unique<Segment>();
  segment->number = *number;
  segment->path = shared_.options.folder + "/" + entry.name;
  std::unique_ptr<File> file;
  Status status = shared_.opener.open(segment->path, FileMode::kReadWrite, &file);
  std::uint64_t length = 0;
  if (status.ok()) status = file->length(&length);
  const std::string wrong = "base_path: " + segment->path + " cannot be read: ";
  if (!status.ok())
    return wrong + describe_file_error(segment->path, status) + "; repair or remove this file";
  segment->file = std::move(file);
  FileBlock block;
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
    return "!base_path: " + segment->path +
           " was written by another version of kvstrata; start that version, or give another "
           "directory (nothing was changed)";
  const bool sound = state == BlockState::kGood && header.segment == *number &&
                     header.length % kFileBlockBytes == 0 && header.length >= kMinSegmentBytes &&
                     header.generation > 0;
  if (state != BlockState::kEmpty && !sound) {
    out_->foreign.push_back({*number, length});
    ++out_->unreadable_segments;
    shared_.notes.add(true,
                      segment->path + " has no sound header; it is left alone and counts as used");
    return "";
  }
  // A file without a header, or shorter than its header says, was being made when its log ended: no
  // frame in it was ever synced.
  if (sound && length >= header.length) {
    segment->length = header.length;
    segment->generation = header.generation;
    synced_ = std::max(synced_, header.synced);
  }
  found_.emplace_back().segment = std::move(segment);
  return "";
}

// Reads the table or, if the segment has no sound table, its frames one after the other.
Status Recovery::read_chain(Found& found) {
  Segment& segment = *found.segment;
  if (segment.length == 0) return Status();
  FileBlock block;
  const ReadPart part[] = {{block.bytes.data(), kFileBlockBytes}};
  KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, part, segment.length - kFileBlockBytes));
  const auto bytes = table_length(block, segment.number, segment.generation);
  if (bytes.has_value() && *bytes <= segment.length - kSegmentHeaderBytes) {
    std::vector<FileBlock> blocks(*bytes / kFileBlockBytes);
    const ReadPart parts[] = {{blocks.data(), *bytes}};
    KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, parts, segment.length - *bytes));
    if (auto table = decode_table(blocks)) {
      found.listed = true;
      found.entries = std::move(table->entries);
      segment.last = table->last;
      segment.end = table->end;
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
    found.chain.push_back({.header = std::move(*header),
                           .block = static_cast<std::uint32_t>(segment.end / kFileBlockBytes)});
    segment.end += frame_bytes;
  }
  return Status();
}

// Finds the last frame that counts and ends the chains there, in memory. Changes nothing on the
// medium.
std::string Recovery::find_end() {
  struct Loose {
    std::uint64_t sequence;
    Found* in;
    std::size_t at;
  };
  std::vector<Loose> loose;
  for (Found& found : found_) {
    for (std::size_t at = 0; at < found.chain.size(); ++at) {
      const std::uint64_t sequence = found.chain[at].header.name.sequence;
      if (sequence > synced_) loose.push_back({sequence, &found, at});
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
    out_->unmarked = out_->unmarked || at.header.kind != FrameKind::kSkip;
  }
  out_->sequence = last;
  for (Found& found : found_) {
    const auto end = std::find_if(found.chain.begin(), found.chain.end(), [&](const auto& frame) {
      return frame.header.name.sequence > last;
    });
    if (end == found.chain.end()) continue;
    Segment& segment = *found.segment;
    segment.end = std::uint64_t{end->block} * kFileBlockBytes;
    found.chain.erase(end, found.chain.end());
    segment.last = found.chain.empty() ? FrameName{} : found.chain.back().header.name;
    cut_.push_back(&segment);
  }
  return "";
}

// Overwrites the first frame that does not count in each segment: otherwise the marks in later
// frames would one day say that this frame had been synced.
Status Recovery::cut_log() noexcept {
  for (Segment* const segment : cut_) {
    const FileBlock zeros;
    const WritePart parts[] = {{zeros.bytes.data(), kFileBlockBytes}};
    KVSTRATA_RETURN_IF_ERROR(segment->file->write(parts, segment->end));
  }
  return Status();
}

// Makes the frames that count durable and sorts the segments.
Status Recovery::settle() {
  for (Found& found : found_) {
    Segment& segment = *found.segment;
    if (!found.listed) KVSTRATA_RETURN_IF_ERROR(segment.file->sync());
    // A file without frames is removed, because its name may never have been synced. A power cut
    // may bring the file back; then the next open removes it again. Frames that were cut off from
    // it are overwritten by then, whether this process or an earlier one cut them off.
    if (segment.generation == 1 && !segment.has_frames()) {
      std::uint64_t length_bytes = segment.length;
      if (length_bytes == 0) KVSTRATA_RETURN_IF_ERROR(segment.file->length(&length_bytes));
      out_->leftovers.push_back({.path = segment.path,
                                 .number = segment.number,
                                 .length_bytes = length_bytes,
                                 .has_frames = false});
      found.segment.reset();
    }
  }
  for (Found& found : found_) {
    if (found.segment == nullptr) continue;
    for (const Found::Frame& frame : found.chain)
      add_entries(frame.header, frame.block, &found.segment->table);
    out_->segments.push_back({.segment = std::move(found.segment),
                              .listed = found.listed,
                              .entries = std::move(found.entries)});
  }
  std::ranges::stable_sort(out_->segments, {}, [](const Recovered::FoundSegment& found) {
    return found.segment->last.sequence;
  });
  return Status();
}

}  // namespace

std::string recover(Shared& shared, Recovered* out) {
  return Recovery(shared, out).run();
}

void for_each_record(const Recovered& recovered,
                     const std::function<void(Segment&, const TableEntry&)>& visit) {
  const auto for_each_entry = [&](auto&& take) {
    for (const Recovered::FoundSegment& found : recovered.segments) {
      for (const TableEntry& entry : found.listed ? found.entries : found.segment->table)
        take(*found.segment, entry);
    }
  };
  std::uint64_t cleared = 0;
  std::unordered_map<Digest, std::uint64_t, KeyHash> tombstones;  // the last one of each key
  for_each_entry([&](Segment&, const TableEntry& entry) {
    if (entry.kind == FrameKind::kClear) cleared = std::max(cleared, entry.sequence);
    if (entry.kind == FrameKind::kTombstones) {
      std::uint64_t& last = tombstones[entry.key];
      last = std::max(last, entry.sequence);
    }
  });
  for_each_entry([&](Segment& segment, const TableEntry& entry) {
    if (entry.kind != FrameKind::kRecord || entry.sequence <= cleared) return;
    const auto tombstone = tombstones.find(entry.key);
    if (tombstone != tombstones.end() && tombstone->second > entry.sequence) return;
    visit(segment, entry);
  });
}

}  // namespace kvstrata::disk
