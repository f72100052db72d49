// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/append.h"

#include <algorithm>
#include <cerrno>
#include <random>
#include <utility>

namespace kvstrata::disk {

namespace {

std::uint64_t random_run() {
  std::random_device random;
  const std::uint64_t bits = std::uint64_t{random()} << 32 | random();
  return bits | 1;  // 0 means: no frame
}

}  // namespace

Appender::Appender(Shared& shared, Segments& segments)
    : shared_(shared), segments_(segments), run_(random_run()) {}

Status Appender::refused() const noexcept {
  if (stopping()) return Status(StatusCode::kRefused, Reason::kReadOnly, "closed");
  if (read_only()) return Status(StatusCode::kRefused, Reason::kReadOnly, "a write failed");
  return Status();
}

void Appender::write_failed(const std::string& what) noexcept {
  read_only_ = true;
  shared_.notes.add(true, what + "; nothing more is put until the server is started again");
  shared_.changed.notify_all();  // commit() fails now
}

// -- places

bool Appender::fits(const Segment& segment, std::uint64_t frame_bytes,
                    std::size_t entries) const noexcept {
  return segment.end + frame_bytes + table_bytes(segment.table.size() + entries) <= segment.length;
}

std::optional<Status> Appender::take_room(std::uint64_t frame_bytes, std::size_t entries,
                                          bool leave_reserved) {
  for (;;) {
    if (const Status status = refused(); !status.ok()) return status;
    Segment* const active = segments_.active();
    if (active != nullptr && fits(*active, frame_bytes, entries)) return Status();
    if (active != nullptr) {
      segments_.move(*active, SegmentState::kFull);
    } else if (segments_.free().size() > (leave_reserved ? segments_.reserved() : 0)) {
      segments_.move(segments_.at(segments_.free().front()), SegmentState::kActive);
      shared_.due.notify_all();
    } else {
      return std::nullopt;
    }
  }
}

PlacedFrame Appender::place(FrameHeader header) {
  Segment& segment = *segments_.active();
  header.segment = segment.number;
  header.generation = segment.generation;
  header.name = FrameName{.run = run_, .sequence = ++sequence_};
  header.previous = segment.last;
  header.synced = synced_;
  PlacedFrame placed{.file = segment.file,
                     .header = std::move(header),
                     .segment = segment.number,
                     .block = static_cast<std::uint32_t>(segment.end / kFileBlockBytes)};
  const FrameHeader& made = placed.header;
  add_entries(made, placed.block, &segment.table);
  segment.last = made.name;
  segment.end += made.frame_bytes();
  writing_.insert(made.name.sequence);
  return placed;
}

void Appender::written(const PlacedFrame& placed, const Status& status) noexcept {
  if (!status.ok())
    return write_failed("cannot write " +
                        describe_file_error(segments_.at(placed.segment).path, status));
  shared_.counts.written_bytes += placed.header.frame_bytes();
  segments_.at(placed.segment).dirty = true;
  writing_.erase(placed.header.name.sequence);
  shared_.changed.notify_all();
}

Status Appender::append(Lock& lock, FrameHeader header) {
  const PlacedFrame placed = place(std::move(header));
  lock.unlock();
  const Status status = write_frame(placed, nullptr);
  lock.lock();
  written(placed, status);
  return status;
}

// -- syncs

std::uint64_t Appender::written_up_to() const noexcept {
  return writing_.empty() ? sequence_ : *writing_.begin() - 1;
}

Status Appender::commit(Lock& lock, std::uint64_t sequence) noexcept {
  while (synced_ < sequence) {
    if (read_only()) return Status(StatusCode::kOsError, "fdatasync", EIO);
    if (syncing_ || written_up_to() < sequence) {
      shared_.changed.wait(lock);
      continue;
    }
    syncing_ = true;
    const std::uint64_t up_to = written_up_to();
    std::vector<std::shared_ptr<File>> dirty;
    for (const auto& [number, segment] : segments_.by_number()) {
      if (!segment->dirty) continue;
      segment->dirty = false;
      dirty.push_back(segment->file);
    }
    lock.unlock();
    Status status;
    for (const std::shared_ptr<File>& file : dirty) {
      if (status.ok()) status = file->sync();
    }
    lock.lock();
    shared_.counts.syncs += dirty.size();
    syncing_ = false;
    if (status.ok()) {
      synced_ = up_to;
    } else {
      write_failed("a sync failed: " + describe_file_error(shared_.options.folder, status));
    }
    shared_.changed.notify_all();
    if (!segments_.full().empty() &&
        segments_.at(segments_.full().back()).state == SegmentState::kFull)
      shared_.due.notify_all();
  }
  return Status();
}

}  // namespace kvstrata::disk
