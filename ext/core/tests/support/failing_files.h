// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// FailingFiles: a file layer around another whose calls fail when told to, and go on afterwards.
//
//     FailingFiles files(posix_files());
//     files.fail(FileCall::kWrite, 3, ENOSPC);   // the third write from now
//     files.fail_all(FileCall::kSync, EIO);      // every sync until heal()
//
// A call that fails changes nothing, with two exceptions, which are those of files.h: of a write
// that fails its first half is written, in whole blocks; and what was written before a sync that
// failed may be lost at a power cut whatever is synced later, where the layer below can lose
// things (UnsyncedLoss).
//
// Thread-safe. `below` must outlive it and its files.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files/files.h"

namespace kvstrata::testing {

enum class FileCall : std::uint8_t {
  kOpen,
  kRead,
  kWrite,
  kSync,
  kAllocate,
  kTruncate,
  kRename,
  kUnlink,
  kMakeFolder,
  kSyncFolder,
  kStat,
  kList,
  kLock,
};
inline constexpr std::size_t kFileCalls = 13;

// A file of a layer that models what a power cut leaves.
class UnsyncedLoss {
 public:
  virtual ~UnsyncedLoss() = default;
  // A sync failed: no later one makes what was written until now durable.
  virtual void lose_unsynced() noexcept = 0;
};

class FailingFiles final : public FileLayer {
 public:
  explicit FailingFiles(FileLayer& below) : below_(below) {}

  // The `nth` call from now on, counted from 1, fails with `error`.
  void fail(FileCall call, std::uint64_t nth, int error) {
    const std::lock_guard lock(mutex_);
    plan(call) = {.error = error, .left = nth, .all = false};
  }
  void fail_all(FileCall call, int error) {
    const std::lock_guard lock(mutex_);
    plan(call) = {.error = error, .left = 0, .all = true};
  }
  void heal(FileCall call) {
    const std::lock_guard lock(mutex_);
    plan(call) = {};
  }
  // How many calls were made, those that failed among them.
  std::uint64_t calls(FileCall call) {
    const std::lock_guard lock(mutex_);
    return calls_[static_cast<std::size_t>(call)];
  }

  Status open(const std::string& path, FileMode mode, bool direct,
              std::unique_ptr<File>* out) noexcept override {
    if (const auto failed = turn(FileCall::kOpen)) return *failed;
    std::unique_ptr<File> file;
    KVSTRATA_RETURN_IF_ERROR(below_.open(path, mode, direct, &file));
    *out = std::make_unique<FailingFile>(*this, std::move(file));
    return Status();
  }
  Status rename(const std::string& from, const std::string& to) noexcept override {
    if (const auto failed = turn(FileCall::kRename)) return *failed;
    return below_.rename(from, to);
  }
  Status unlink(const std::string& path) noexcept override {
    if (const auto failed = turn(FileCall::kUnlink)) return *failed;
    return below_.unlink(path);
  }
  Status make_folder(const std::string& path) noexcept override {
    if (const auto failed = turn(FileCall::kMakeFolder)) return *failed;
    return below_.make_folder(path);
  }
  Status sync_folder(const std::string& path) noexcept override {
    if (const auto failed = turn(FileCall::kSyncFolder)) return *failed;
    return below_.sync_folder(path);
  }
  Status stat(const std::string& path, FileStat* out) noexcept override {
    if (const auto failed = turn(FileCall::kStat)) return *failed;
    return below_.stat(path, out);
  }
  Status list(const std::string& path, std::vector<FolderEntry>* out) noexcept override {
    if (const auto failed = turn(FileCall::kList)) return *failed;
    return below_.list(path, out);
  }
  Status space(const std::string& path, FileSpace* out) noexcept override {
    return below_.space(path, out);
  }
  Status lock(const std::string& path, std::unique_ptr<FileLock>* out,
              std::string* holder) noexcept override {
    if (const auto failed = turn(FileCall::kLock)) return *failed;
    return below_.lock(path, out, holder);
  }
  Status lock_shared(const std::string& path, std::unique_ptr<FileLock>* out,
                     std::string* holder) noexcept override {
    if (const auto failed = turn(FileCall::kLock)) return *failed;
    return below_.lock_shared(path, out, holder);
  }

 private:
  class FailingFile final : public File {
   public:
    FailingFile(FailingFiles& layer, std::unique_ptr<File> below)
        : layer_(layer), below_(std::move(below)) {}

    Status read(std::span<const ReadPart> parts, std::uint64_t offset) noexcept override {
      if (const auto failed = layer_.turn(FileCall::kRead)) return *failed;
      return below_->read(parts, offset);
    }
    Status write(std::span<const WritePart> parts, std::uint64_t offset) noexcept override {
      const auto failed = layer_.turn(FileCall::kWrite);
      if (!failed) return below_->write(parts, offset);
      std::uint64_t length = 0;
      for (const WritePart& part : parts)
        length += part.length;
      std::uint64_t left = length / 2 / kFileBlockBytes * kFileBlockBytes;
      std::vector<WritePart> half;
      for (const WritePart& part : parts) {
        if (left == 0) break;
        half.push_back(
            {part.bytes, static_cast<std::size_t>(std::min<std::uint64_t>(part.length, left))});
        left -= half.back().length;
      }
      if (!half.empty()) KVSTRATA_RETURN_IF_ERROR(below_->write(half, offset));
      return *failed;
    }
    Status sync() noexcept override {
      const auto failed = layer_.turn(FileCall::kSync);
      if (!failed) return below_->sync();
      if (auto* const losing = dynamic_cast<UnsyncedLoss*>(below_.get())) losing->lose_unsynced();
      return *failed;
    }
    Status allocate(std::uint64_t length) noexcept override {
      if (const auto failed = layer_.turn(FileCall::kAllocate)) return *failed;
      return below_->allocate(length);
    }
    Status truncate(std::uint64_t length) noexcept override {
      if (const auto failed = layer_.turn(FileCall::kTruncate)) return *failed;
      return below_->truncate(length);
    }
    Status stat(FileStat* out) noexcept override { return below_->stat(out); }
    Status set_access_time(std::int64_t unix_ns) noexcept override {
      return below_->set_access_time(unix_ns);
    }
    bool direct() const noexcept override { return below_->direct(); }

   private:
    FailingFiles& layer_;
    std::unique_ptr<File> below_;
  };

  struct Plan {
    int error = 0;
    std::uint64_t left = 0;  // 1: the next call
    bool all = false;
  };

  Plan& plan(FileCall call) { return plans_[static_cast<std::size_t>(call)]; }

  // What this call has to fail with.
  std::optional<Status> turn(FileCall call) {
    const std::lock_guard lock(mutex_);
    ++calls_[static_cast<std::size_t>(call)];
    Plan& planned = plan(call);
    if (!planned.all && (planned.left == 0 || --planned.left > 0)) return std::nullopt;
    return Status(StatusCode::kOsError, "injected", planned.error);
  }

  FileLayer& below_;
  std::mutex mutex_;
  std::array<Plan, kFileCalls> plans_{};
  std::array<std::uint64_t, kFileCalls> calls_{};
};

}  // namespace kvstrata::testing
