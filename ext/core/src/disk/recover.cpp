// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/recover.h"

#include <algorithm>
#include <cerrno>
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
// Each opening of the log numbers its frames in a range of its own, of this size.
constexpr int kSequenceBits = 32;
// Read at a time, to search for a frame.
constexpr std::uint64_t kSearchBytes = 256 << 10;

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

// Finds the first sound frame header of this segment, of any generation, from `*at` on, and sets
// `*at` to where it begins. nullopt: there is none.
Status find_frame(const Segment& segment, std::uint64_t* at, std::optional<FrameHeader>* header) {
  // The header lies at `*at` unless something is damaged, or the log ends here.
  std::vector<FileBlock> blocks(1);
  header->reset();
  while (*at + kFrameHeaderBytes <= segment.length) {
    blocks.resize(std::min(blocks.size(), (segment.length - *at) / kFileBlockBytes));
    const ReadPart parts[] = {{blocks.data(), blocks.size() * kFileBlockBytes}};
    KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, parts, *at));
    for (const FileBlock& block : blocks) {
      *header = decode_frame(block);
      if (header->has_value() && (*header)->segment == segment.number) return Status();
      *at += kFileBlockBytes;
    }
    header->reset();
    const std::uint64_t data = segment.file->next_data(*at);
    if (data >= segment.length) break;
    *at = std::max(*at, data / kFileBlockBytes * kFileBlockBytes);
    blocks.resize(kSearchBytes / kFileBlockBytes);
  }
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
    [[nodiscard]] std::uint64_t first_sequence() const noexcept {
      return listed ? entries.front().sequence : chain.front().header.name.sequence;
    }

    std::unique_ptr<Segment> segment;
    bool whole = false;     // it has a sound header, and is as long as that says
    bool headless = false;  // its header is damaged, and its frames tell the generation
    bool listed = false;
    std::vector<Frame> chain;         // if not listed
    std::vector<TableEntry> entries;  // of the table, if listed
    std::uint64_t lost = 0;           // frames that cannot be read and whose sequence is unknown
  };
  // Of a frame that does not count.
  struct Cut {
    Segment* segment;
    std::uint32_t block;
  };

  std::string read_segment(const FolderEntry& entry);
  void leave_alone(const Segment& segment);
  Status read_chain(Found& found);
  std::string find_end();
  void judge_headless();
  std::string count_frames(Found& found);
  Status cut_log() noexcept;
  Status settle();

  Shared& shared_;
  Recovered* out_;
  std::vector<Found> found_;
  std::uint64_t synced_ = 0;  // the highest mark
  std::vector<Cut> cut_;
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
  Found found;
  segment->length = length / kFileBlockBytes * kFileBlockBytes;
  segment->generation = 0;
  if (state == BlockState::kGood && header.segment == *number) {
    found.whole = length >= header.length;
    if (!found.whole)
      shared_.notes.add(true, segment->path +
                                  " is shorter than its header says: " + std::to_string(length) +
                                  " instead of " + std::to_string(header.length) + " bytes");
    segment->length = std::min(segment->length, header.length);
    segment->generation = header.generation;
    synced_ = std::max(synced_, header.synced);
  } else {
    std::uint64_t at = kSegmentHeaderBytes;
    std::optional<FrameHeader> first;
    status = find_frame(*segment, &at, &first);
    if (!status.ok()) return unreadable(*segment, status);
    if (first.has_value()) segment->generation = first->generation;
    found.headless = first.has_value();
    if (!found.headless && state != BlockState::kEmpty) {
      leave_alone(*segment);
      return "";
    }
  }
  found.segment = std::move(segment);
  found_.push_back(std::move(found));
  return "";
}

void Recovery::leave_alone(const Segment& segment) {
  std::uint64_t length_bytes = segment.length;
  (void)segment.file->length(&length_bytes);
  out_->foreign.push_back({segment.number, length_bytes});
  ++out_->unreadable_segments;
  shared_.notes.add(true, segment.path +
                              " holds no frames that can be used; it is left alone and "
                              "counts as used");
}

// Reads the table or, if the segment has no sound table, its frames one after the other. Behind a
// damaged frame, searches for the next one.
Status Recovery::read_chain(Found& found) {
  Segment& segment = *found.segment;
  if (segment.generation == 0) return Status();
  FileBlock block;
  const ReadPart part[] = {{block.bytes.data(), kFileBlockBytes}};
  if (segment.length > kSegmentHeaderBytes)
    KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, part, segment.length - kFileBlockBytes));
  const auto bytes = table_length(block, segment.number, segment.generation);
  if (bytes.has_value() && *bytes <= segment.length - kSegmentHeaderBytes) {
    std::vector<FileBlock> blocks(*bytes / kFileBlockBytes);
    const ReadPart parts[] = {{blocks.data(), *bytes}};
    KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, parts, segment.length - *bytes));
    if (auto table = decode_table(blocks); table.has_value() && !table->entries.empty()) {
      found.listed = true;
      found.entries = std::move(table->entries);
      segment.last = table->last;
      segment.end = table->end;
      synced_ = std::max(synced_, table->last.sequence);
      return Status();
    }
  }
  for (std::uint64_t at = kSegmentHeaderBytes;;) {
    std::optional<FrameHeader> header;
    KVSTRATA_RETURN_IF_ERROR(find_frame(segment, &at, &header));
    // Where a frame of an earlier generation lies, no frame of this one was written. So no frame
    // behind that place was acknowledged.
    if (!header.has_value() || header->generation < segment.generation) break;
    synced_ = std::max(synced_, header->synced);
    const std::uint64_t begin = std::exchange(at, at + kFileBlockBytes);
    if (header->record_bytes > segment.length - begin - kFrameHeaderBytes) {
      ++found.lost;  // the file was cut within its record
      continue;
    }
    // (A frame that an earlier server did not acknowledge may lie behind those of a later one.)
    if (header->generation > segment.generation || header->name.sequence <= segment.last.sequence)
      continue;
    at = begin + header->frame_bytes();
    segment.last = header->name;
    segment.end = at;
    found.chain.push_back({.header = std::move(*header),
                           .block = static_cast<std::uint32_t>(begin / kFileBlockBytes)});
  }
  if (segment.end + kFrameHeaderBytes <= segment.length) {
    KVSTRATA_RETURN_IF_ERROR(read_patiently(*segment.file, part, segment.end));
    if (begins_as_frame(block) && !decode_frame(block).has_value()) ++found.lost;
  }
  return Status();
}

// Finds the frames that count. Changes nothing on the medium.
std::string Recovery::find_end() {
  out_->sequence = synced_;
  for (const bool headless : {false, true}) {
    if (headless) judge_headless();
    for (Found& found : found_) {
      if (found.listed || found.headless != headless) continue;
      std::string failed = count_frames(found);
      if (!failed.empty()) return failed;
    }
  }
  // Behind all frames that do not count, found or not.
  out_->sequence = ((out_->sequence >> kSequenceBits) + 1) << kSequenceBits;
  return "";
}

// Segments retire in their order, so a segment whose frames are all older than those of any other
// may have retired already. Without its header that is unknown, and a removed record might be found
// again.
// REQUIRES: the frames of the others are counted. Those that do not count are gone after this open,
// so they must not decide: the next open would find the records that this one did not.
void Recovery::judge_headless() {
  for (auto at = found_.begin(); at != found_.end();) {
    std::uint64_t oldest = ~std::uint64_t{0};  // of the others
    for (const Found& other : found_) {
      if (&other != &*at && other.segment->has_frames())
        oldest = std::min(oldest, other.first_sequence());
    }
    const Segment& segment = *at->segment;
    const bool may_have_retired = ~oldest != 0 && segment.last.sequence < oldest;
    if (at->headless && may_have_retired) {
      leave_alone(segment);
      at = found_.erase(at);
      continue;
    }
    if (at->headless)
      shared_.notes.add(true,
                        segment.path + " has a damaged header; its frames were read without it");
    ++at;
  }
}

// Keeps those frames of a segment that are not behind the highest mark, or are whole.
std::string Recovery::count_frames(Found& found) {
  Segment& segment = *found.segment;
  segment.last = FrameName{};
  segment.end = kSegmentHeaderBytes;
  std::vector<Found::Frame> chain;
  // A cut may have gone between two frames.
  std::uint64_t lost = found.lost + (!found.whole && !found.headless && !found.chain.empty());
  FrameName before;
  for (Found::Frame& frame : found.chain) {
    const FrameName& previous = frame.header.previous;
    const std::uint64_t missing_up_to = std::min(previous.sequence, synced_);
    if (missing_up_to > before.sequence)
      lost += previous.run == before.run ? missing_up_to - before.sequence : 1;
    before = frame.header.name;
    const std::uint64_t sequence = frame.header.name.sequence;
    bool counts = sequence <= synced_;
    if (!counts) {
      const Status status = look_at_payload(segment, frame.block, frame.header, &counts);
      if (!status.ok()) return unreadable(segment, status);
    }
    if (!counts) {
      cut_.push_back({&segment, frame.block});
      continue;
    }
    out_->sequence = std::max(out_->sequence, sequence);
    segment.last = frame.header.name;
    segment.end = std::uint64_t{frame.block} * kFileBlockBytes + frame.header.frame_bytes();
    chain.push_back(std::move(frame));
  }
  found.chain = std::move(chain);
  if (lost == 0) return "";
  out_->lost_frames += lost;
  shared_.notes.add(true, segment.path + ": " + std::to_string(lost) +
                              " frames are damaged, or were unfinished when a server ended; "
                              "their records are lost, and a record that one of them removed may "
                              "be found again");
  return "";
}

// Overwrites the headers of frames that do not count: otherwise a later mark would one day say that
// they had been synced.
Status Recovery::cut_log() noexcept {
  const FileBlock zeros;
  const WritePart parts[] = {{zeros.bytes.data(), kFileBlockBytes}};
  for (const Cut& cut : cut_)
    KVSTRATA_RETURN_IF_ERROR(
        cut.segment->file->write(parts, std::uint64_t{cut.block} * kFileBlockBytes));
  return Status();
}

// Makes the frames that count durable and sorts the segments.
Status Recovery::settle() {
  // The newest segment gets more frames, so its table goes.
  const auto newest = std::ranges::max_element(
      found_, {}, [](const Found& found) { return found.segment->last.sequence; });
  if (newest != found_.end() && newest->listed) {
    const FileBlock zeros;
    const WritePart parts[] = {{zeros.bytes.data(), kFileBlockBytes}};
    Segment& segment = *newest->segment;
    KVSTRATA_RETURN_IF_ERROR(segment.file->write(parts, segment.length - kFileBlockBytes));
    segment.table = std::move(newest->entries);
    newest->listed = false;
  }
  for (Found& found : found_) {
    Segment& segment = *found.segment;
    if (found.headless && segment.has_frames()) {
      // Otherwise a later open might leave the segment alone, with what this one finds in it.
      FileBlock block;
      encode(SegmentHeader{.segment = segment.number,
                           .generation = segment.generation,
                           .length = segment.length,
                           .synced = synced_},
             &block);
      const WritePart parts[] = {{block.bytes.data(), kFileBlockBytes}};
      KVSTRATA_RETURN_IF_ERROR(segment.file->write(parts, 0));
    }
    if (!found.listed || found.headless) KVSTRATA_RETURN_IF_ERROR(segment.file->sync());
    // A file without frames is removed, because its name may never have been synced, or because its
    // log ended while the file was being made. A power cut may bring the file back; then the next
    // open removes it again. Frames that were cut off from it are overwritten by then, whether this
    // process or an earlier one cut them off.
    if ((segment.generation <= 1 || !found.whole) && !segment.has_frames()) {
      const Status removed = shared_.files.unlink(segment.path);
      if (!removed.ok() && !is_os_error(removed, ENOENT)) {
        shared_.notes.add(true, "cannot remove " + describe_file_error(segment.path, removed));
        leave_alone(segment);
      }
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
