// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "support/volatile_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>

#include "support/volatile_machine.h"

namespace kvstrata::testing {

class VolatileFiles::VolatileFile final : public File, public UnsyncedLoss {
 public:
  // REQUIRES: the machine's mutex.
  VolatileFile(std::shared_ptr<Machine> machine, int inode, std::string path, bool direct,
               bool writes)
      : machine_(std::move(machine)),
        inode_(inode),
        path_(std::move(path)),
        direct_(direct),
        writes_(writes) {
    ++self().opens;
  }
  ~VolatileFile() override {
    const std::lock_guard lock(machine_->mutex);
    --self().opens;
    machine_->release(inode_);
  }

  Status read(std::span<const ReadPart> parts, std::uint64_t offset) noexcept override {
    const std::lock_guard lock(machine_->mutex);
    if (machine_->stopped) return error(EIO);
    KVSTRATA_RETURN_IF_ERROR(check_parts(parts, offset));
    const Content& content = self().content;
    for (const ReadPart& part : parts) {
      const std::uint64_t left =
          offset < content.length() ? content.length() - offset : std::uint64_t{0};
      const std::size_t take = std::min<std::uint64_t>(part.length, left);
      content.read(offset, {static_cast<unsigned char*>(part.bytes), take});
      if (take < part.length)
        return Status(StatusCode::kOutOfRange, "the file ends before", offset + take);
      offset += take;
    }
    return Status();
  }

  Status write(std::span<const WritePart> parts, std::uint64_t offset) noexcept override {
    const std::lock_guard lock(machine_->mutex);
    if (machine_->stopped) return error(EIO);
    if (!writes_) return error(EBADF);
    KVSTRATA_RETURN_IF_ERROR(check_parts(parts, offset));
    std::vector<unsigned char> bytes;
    for (const WritePart& part : parts) {
      const auto* const begin = static_cast<const unsigned char*>(part.bytes);
      bytes.insert(bytes.end(), begin, begin + part.length);
    }
    if (bytes.empty()) return Status();
    bool is_last = false;
    KVSTRATA_RETURN_IF_ERROR(machine_->begin_step(
        "write", path_ + " " + std::to_string(offset) + "+" + std::to_string(bytes.size()),
        &is_last));
    if (is_last) {
      // What a process that dies while it writes has written: up to some block.
      const std::uint64_t blocks = bytes.size() / kTornBytes + 1;
      bytes.resize(
          std::min<std::uint64_t>(bytes.size(), machine_->random.below(blocks + 1) * kTornBytes));
    }
    const std::size_t wanted = bytes.size();
    bytes.resize(fitting(offset, wanted));
    const bool fits = bytes.size() == wanted;
    if (!bytes.empty())
      machine_->change(
          &self(), {.kind = Change::Kind::kWrite,
                    .at = offset,
                    .bytes = std::make_shared<const std::vector<unsigned char>>(std::move(bytes))});
    if (is_last) return error(EIO);
    return fits ? Status() : error(ENOSPC);
  }

  [[gnu::noinline]] Status sync() noexcept override {
    void* const caller = __builtin_return_address(0);
    const std::lock_guard lock(machine_->mutex);
    return machine_->step("sync", path_, [&] {
      if (machine_->sites->reached(caller)) Machine::settle_file(&self());
      return Status();
    });
  }

  Status allocate(std::uint64_t length) noexcept override {
    const std::lock_guard lock(machine_->mutex);
    if (machine_->stopped) return error(EIO);
    if (!writes_) return error(EBADF);
    if (length == 0) return error(EINVAL);
    if (!machine_->options.reserves)
      return machine_->step("lengthen", path_ + " " + std::to_string(length), [&] {
        if (length > self().content.length())
          machine_->change(&self(),
                           {.kind = Change::Kind::kTruncate, .at = length, .bytes = nullptr});
        return Status();
      });
    Content grown = self().content;
    grown.reserve(length);
    return machine_->step("allocate", path_ + " " + std::to_string(length), [&] {
      if (grown.blocks() - self().content.blocks() > machine_->free_blocks()) return error(ENOSPC);
      machine_->change(&self(), {.kind = Change::Kind::kAllocate, .at = length, .bytes = nullptr});
      return Status();
    });
  }

  Status truncate(std::uint64_t length) noexcept override {
    const std::lock_guard lock(machine_->mutex);
    if (machine_->stopped) return error(EIO);
    if (!writes_) return error(EINVAL);
    return machine_->step("truncate", path_ + " " + std::to_string(length), [&] {
      machine_->change(&self(), {.kind = Change::Kind::kTruncate, .at = length, .bytes = nullptr});
      return Status();
    });
  }

  Status stat(FileStat* out) noexcept override {
    const std::lock_guard lock(machine_->mutex);
    if (machine_->stopped) return error(EIO);
    *out = machine_->told(inode_);
    return Status();
  }

  Status set_access_time(std::int64_t unix_ns) noexcept override {
    const std::lock_guard lock(machine_->mutex);
    if (machine_->stopped) return error(EIO);
    self().accessed_unix_ns = unix_ns;
    return Status();
  }

  bool direct() const noexcept override { return direct_; }

  void lose_unsynced() noexcept override {
    const std::lock_guard lock(machine_->mutex);
    for (Change& change : self().changes)
      if (change.fate == Change::Fate::kOpen) change.fate = Change::Fate::kLost;
  }

 private:
  Inode& self() { return machine_->inodes[static_cast<std::size_t>(inode_)]; }

  template <typename Part>
  Status check_parts(std::span<const Part> parts, std::uint64_t offset) const {
    if (parts.size() > kMaxParts) return Status(StatusCode::kBadArgument, "parts: too many");
    std::uint64_t length = 0;
    for (const Part& part : parts)
      length += part.length;
    if (direct_ && (offset % kFileBlockBytes != 0 || length % kFileBlockBytes != 0))
      return Status(StatusCode::kBadArgument, "direct: not whole blocks");
    return Status();
  }

  // How much of a write has room.
  std::size_t fitting(std::uint64_t offset, std::size_t length) {
    std::uint64_t free = machine_->free_blocks();
    std::uint64_t at = offset;
    while (at < offset + length) {
      if (!self().content.has_block(at / kFileBlockBytes) && free-- == 0) break;
      at = (at / kFileBlockBytes + 1) * kFileBlockBytes;
    }
    return std::min<std::uint64_t>(at - offset, length);
  }

  const std::shared_ptr<Machine> machine_;
  const int inode_;
  const std::string path_;
  const bool direct_;
  const bool writes_;
};

class VolatileFiles::VolatileLock final : public FileLock {
 public:
  // REQUIRES: the machine's mutex; it is open and locked.
  VolatileLock(std::shared_ptr<Machine> machine, int inode)
      : machine_(std::move(machine)), inode_(inode) {}
  ~VolatileLock() override {
    const std::lock_guard lock(machine_->mutex);
    Inode& inode = machine_->inodes[static_cast<std::size_t>(inode_)];
    --inode.locks;
    --inode.opens;
    machine_->release(inode_);
  }
  void note(const std::string& text) noexcept override {
    const std::lock_guard lock(machine_->mutex);
    if (!machine_->stopped) machine_->inodes[static_cast<std::size_t>(inode_)].note = text;
  }

 private:
  const std::shared_ptr<Machine> machine_;
  const int inode_;
};

VolatileFiles::VolatileFiles(VolatileOptions options, std::shared_ptr<SyncSites> sites)
    : machine_(std::make_shared<Machine>(options, std::move(sites))) {
  machine_->inodes.emplace_back().is_folder = true;
  machine_->inodes[0].links = 1;
}

void VolatileFiles::stop_at(std::uint64_t step, std::uint64_t seed) {
  const std::lock_guard lock(machine_->mutex);
  machine_->last_step = step;
  machine_->random = Random(seed ^ (step << 32));
}

void VolatileFiles::stop() {
  const std::lock_guard lock(machine_->mutex);
  machine_->stopped = true;
}

void VolatileFiles::settle() {
  const std::lock_guard lock(machine_->mutex);
  for (std::size_t i = 0; i < machine_->inodes.size(); ++i) {
    Machine::settle_file(&machine_->inodes[i]);
    machine_->settle_folder(static_cast<int>(i));
  }
}

bool VolatileFiles::stopped() const {
  const std::lock_guard lock(machine_->mutex);
  return machine_->stopped;
}

std::uint64_t VolatileFiles::steps() const {
  const std::lock_guard lock(machine_->mutex);
  return machine_->steps;
}

std::vector<std::string> VolatileFiles::trace() const {
  const std::lock_guard lock(machine_->mutex);
  return machine_->trace;
}

SyncSites& VolatileFiles::sync_sites() const {
  return *machine_->sites;
}

std::unique_ptr<VolatileFiles> VolatileFiles::cut(Kept kept, std::uint64_t seed) {
  std::unique_ptr<VolatileFiles> next = copy(std::string("power cut, kept: ") + kept_name(kept));
  next->machine_->lose(kept, Random(seed));
  return next;
}

Status VolatileFiles::open(const std::string& path, FileMode mode, bool direct,
                           std::unique_ptr<File>* out) noexcept {
  const std::lock_guard lock(machine_->mutex);
  Machine& machine = *machine_;
  if (machine.stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine.find(path, &place));
  const bool creates = mode == FileMode::kCreate;
  if (!creates && place.inode < 0) return error(ENOENT);
  if (creates && place.inode >= 0) return error(EEXIST);
  if (!creates && machine.inodes[place.inode].is_folder) return error(EISDIR);
  if (direct && !machine.options.direct)
    return Status(StatusCode::kUnsupported, "this file system has no direct files");
  if (creates) {
    KVSTRATA_RETURN_IF_ERROR(machine.step("create", path, [&] {
      place.inode = machine.make(place, false);
      return Status();
    }));
  }
  *out =
      std::make_unique<VolatileFile>(machine_, place.inode, path, direct, mode != FileMode::kRead);
  return Status();
}

Status VolatileFiles::rename(const std::string& from, const std::string& to) noexcept {
  const std::lock_guard lock(machine_->mutex);
  Machine& machine = *machine_;
  if (machine.stopped) return error(EIO);
  Place source, target;
  KVSTRATA_RETURN_IF_ERROR(machine.find(from, &source));
  KVSTRATA_RETURN_IF_ERROR(machine.find(to, &target));
  if (source.inode < 0) return error(ENOENT);
  if (source.inode == target.inode) return Status();  // two names of a file: both stay
  const bool is_folder = machine.inodes[source.inode].is_folder;
  if (target.inode >= 0) {
    const Inode& replaced = machine.inodes[target.inode];
    if (replaced.is_folder && !is_folder) return error(EISDIR);
    if (!replaced.is_folder && is_folder) return error(ENOTDIR);
    if (replaced.is_folder && !replaced.names.empty()) return error(ENOTEMPTY);
  }
  for (int at = target.folder; is_folder; at = machine.inodes[at].parent) {
    if (at == source.inode) return error(EINVAL);  // into itself
    if (at == 0) break;
  }
  return machine.step("rename", from + " -> " + to, [&] {
    machine.move(source, target);
    return Status();
  });
}

Status VolatileFiles::unlink(const std::string& path) noexcept {
  const std::lock_guard lock(machine_->mutex);
  Machine& machine = *machine_;
  if (machine.stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine.find(path, &place));
  if (place.inode < 0) return error(ENOENT);
  if (machine.inodes[place.inode].is_folder) return error(EISDIR);
  return machine.step("unlink", path, [&] {
    machine.name(place.folder, place.name, kNone);
    return Status();
  });
}

Status VolatileFiles::make_folder(const std::string& path) noexcept {
  const std::lock_guard lock(machine_->mutex);
  Machine& machine = *machine_;
  if (machine.stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine.find(path, &place));
  if (place.inode >= 0) return error(EEXIST);
  return machine.step("make_folder", path, [&] {
    machine.make(place, true);
    return Status();
  });
}

Status VolatileFiles::sync_folder(const std::string& path) noexcept {
  void* const caller = __builtin_return_address(0);
  const std::lock_guard lock(machine_->mutex);
  Machine& machine = *machine_;
  if (machine.stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine.find(path, &place));
  if (place.inode < 0) return error(ENOENT);
  if (!machine.inodes[place.inode].is_folder) return error(ENOTDIR);
  return machine.step("sync_folder", path, [&] {
    if (machine.sites->reached(caller)) machine.settle_folder(place.inode);
    return Status();
  });
}

Status VolatileFiles::stat(const std::string& path, FileStat* out) noexcept {
  const std::lock_guard lock(machine_->mutex);
  if (machine_->stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine_->find(path, &place));
  if (place.inode < 0) return error(ENOENT);
  *out = machine_->told(place.inode);
  return Status();
}

Status VolatileFiles::list(const std::string& path, std::vector<FolderEntry>* out) noexcept {
  out->clear();
  const std::lock_guard lock(machine_->mutex);
  if (machine_->stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine_->find(path, &place));
  if (place.inode < 0) return error(ENOENT);
  if (!machine_->inodes[place.inode].is_folder) return error(ENOTDIR);
  for (const auto& [name, inode] : machine_->inodes[place.inode].names) {
    const bool is_folder = machine_->inodes[inode].is_folder;
    out->push_back({.name = name, .is_file = !is_folder, .is_folder = is_folder});
  }
  return Status();
}

Status VolatileFiles::space(const std::string& path, FileSpace* out) noexcept {
  const std::lock_guard lock(machine_->mutex);
  if (machine_->stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine_->find(path, &place));
  if (place.inode < 0) return error(ENOENT);
  out->total_bytes = machine_->options.total_bytes;
  out->free_bytes = machine_->free_blocks() * kFileBlockBytes;
  return Status();
}

Status VolatileFiles::lock(const std::string& path, std::unique_ptr<FileLock>* out,
                           std::string* holder) noexcept {
  const std::lock_guard lock(machine_->mutex);
  Machine& machine = *machine_;
  if (machine.stopped) return error(EIO);
  Place place;
  KVSTRATA_RETURN_IF_ERROR(machine.find(path, &place));
  if (place.inode < 0) {
    KVSTRATA_RETURN_IF_ERROR(machine.step("create lock", path, [&] {
      place.inode = machine.make(place, false);
      return Status();
    }));
  }
  Inode& inode = machine.inodes[place.inode];
  if (inode.is_folder) return error(EISDIR);
  if (inode.locks > 0) {
    *holder = inode.note;
    return Status(StatusCode::kBusy, "locked");
  }
  ++inode.locks;
  ++inode.opens;
  *out = std::make_unique<VolatileLock>(machine_, place.inode);
  return Status();
}

std::unique_ptr<VolatileFiles> VolatileFiles::copy(const std::string& why) {
  const std::lock_guard lock(machine_->mutex);
  machine_->stopped = true;
  auto next = std::make_shared<Machine>(machine_->options, machine_->sites);
  next->inodes = machine_->inodes;
  next->used_blocks = machine_->used_blocks;
  next->next_id = machine_->next_id;
  next->now_unix_ns = machine_->now_unix_ns;
  next->trace = machine_->trace;
  if (next->options.traces) next->trace.push_back(why);
  for (std::size_t i = 0; i < next->inodes.size(); ++i) {
    Inode& inode = next->inodes[i];
    if (inode.opens == 0) continue;
    inode.opens = 0;
    inode.locks = 0;
    next->release(static_cast<int>(i));
  }
  return std::unique_ptr<VolatileFiles>(new VolatileFiles(std::move(next)));
}

}  // namespace kvstrata::testing
