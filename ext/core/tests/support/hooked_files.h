// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A file layer that lets a test look at each call before and after it reaches the real one: to fail
// it, to hold it up, or to kill the process there.
//
//     HookedFiles files(posix_files());
//     files.fail_all("sync", EIO);  // until files.heal("sync")
//
// A call that fails this way changes nothing, with two exceptions, which are those of files.h: of a
// write the first half is written, in whole blocks; and what was written before a sync that failed
// may be lost at a power cut whatever is synced later, where the layer below can lose things
// (UnsyncedLoss).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files/files.h"

namespace kvstrata::testing {

// A file of a layer that models what a power cut leaves.
class UnsyncedLoss {
 public:
  virtual ~UnsyncedLoss() = default;
  // A sync failed: no later one makes what was written until now durable.
  virtual void lose_unsynced() noexcept = 0;
};

class HookedFiles final : public FileLayer {
 public:
  // `call` is one of open, create, read, write, sync, allocate, truncate, access_time, rename,
  // unlink, make_folder, sync_folder, stat, list. Called by several threads at a
  // time.
  using Before = std::function<Status(const std::string& call, const std::string& path)>;
  using After = std::function<void(const std::string& call, const std::string& path)>;

  explicit HookedFiles(FileLayer& inner = posix_files()) : inner_(inner) {}

  Before before = [](const std::string&, const std::string&) { return Status(); };
  After after = [](const std::string&, const std::string&) {};
  std::function<void(const std::string& path, FileStat* stat)> see_stat = [](const std::string&,
                                                                             FileStat*) {};
  std::function<Status(File& file, std::span<const WritePart> parts, std::uint64_t offset)> write =
      [](File& file, std::span<const WritePart> parts, std::uint64_t offset) {
        return file.write(parts, offset);
      };
  std::function<Status(File& file, std::uint64_t length)> allocate =
      [](File& file, std::uint64_t length) { return file.allocate(length); };
  bool buffered_only = false;  // as a file system without O_DIRECT

  void fail_all(const std::string& call, int error) {
    const std::lock_guard lock(mutex_);
    failing_[call] = error;
  }
  void heal(const std::string& call) {
    const std::lock_guard lock(mutex_);
    failing_.erase(call);
  }

  Status open(const std::string& path, FileMode mode, bool direct,
              std::unique_ptr<File>* out) noexcept override {
    if (direct && buffered_only) return Status(StatusCode::kUnsupported, "none");
    return hooked(mode == FileMode::kCreate ? "create" : "open", path, [&] {
      std::unique_ptr<File> file;
      KVSTRATA_RETURN_IF_ERROR(inner_.open(path, mode, direct, &file));
      *out = std::make_unique<Hooked>(*this, path, std::move(file));
      return Status();
    });
  }
  Status rename(const std::string& from, const std::string& to) noexcept override {
    return hooked("rename", to, [&] { return inner_.rename(from, to); });
  }
  Status unlink(const std::string& path) noexcept override {
    return hooked("unlink", path, [&] { return inner_.unlink(path); });
  }
  Status make_folder(const std::string& path) noexcept override {
    return hooked("make_folder", path, [&] { return inner_.make_folder(path); });
  }
  Status sync_folder(const std::string& path) noexcept override {
    return hooked("sync_folder", path, [&] { return inner_.sync_folder(path); });
  }
  Status stat(const std::string& path, FileStat* out) noexcept override {
    return hooked("stat", path, [&] {
      KVSTRATA_RETURN_IF_ERROR(inner_.stat(path, out));
      see_stat(path, out);
      return Status();
    });
  }
  Status list(const std::string& path, std::vector<FolderEntry>* out) noexcept override {
    return hooked("list", path, [&] { return inner_.list(path, out); });
  }
  Status space(const std::string& path, FileSpace* out) noexcept override {
    return inner_.space(path, out);
  }
  Status lock(const std::string& path, std::unique_ptr<FileLock>* out,
              std::string* holder) noexcept override {
    return inner_.lock(path, out, holder);
  }

 private:
  class Hooked final : public File {
   public:
    Hooked(HookedFiles& layer, std::string path, std::unique_ptr<File> file)
        : layer_(layer), path_(std::move(path)), file_(std::move(file)) {}
    Status read(std::span<const ReadPart> parts, std::uint64_t offset) noexcept override {
      return layer_.hooked("read", path_, [&] { return file_->read(parts, offset); });
    }
    Status write(std::span<const WritePart> parts, std::uint64_t offset) noexcept override {
      if (const auto failed = layer_.failure("write")) {
        KVSTRATA_RETURN_IF_ERROR(write_half(parts, offset));
        return *failed;
      }
      return layer_.hooked("write", path_, [&] { return layer_.write(*file_, parts, offset); });
    }
    Status sync() noexcept override {
      if (layer_.failure("sync"))
        if (auto* const losing = dynamic_cast<UnsyncedLoss*>(file_.get())) losing->lose_unsynced();
      return layer_.hooked("sync", path_, [&] { return file_->sync(); });
    }
    Status allocate(std::uint64_t length) noexcept override {
      return layer_.hooked("allocate", path_, [&] { return layer_.allocate(*file_, length); });
    }
    std::uint64_t next_data(std::uint64_t offset) noexcept override {
      return file_->next_data(offset);
    }
    Status truncate(std::uint64_t length) noexcept override {
      return layer_.hooked("truncate", path_, [&] { return file_->truncate(length); });
    }
    Status stat(FileStat* out) noexcept override { return file_->stat(out); }
    Status set_access_time(std::int64_t unix_ns) noexcept override {
      return layer_.hooked("access_time", path_, [&] { return file_->set_access_time(unix_ns); });
    }
    bool direct() const noexcept override { return file_->direct(); }

   private:
    Status write_half(std::span<const WritePart> parts, std::uint64_t offset) noexcept {
      std::uint64_t length = 0;
      for (const WritePart& part : parts)
        length += part.length;
      std::uint64_t left = length / 2 / kFileBlockBytes * kFileBlockBytes;
      std::vector<WritePart> half;
      for (const WritePart& part : parts) {
        if (left == 0) break;
        half.push_back({part.bytes, std::min<std::size_t>(part.length, left)});
        left -= half.back().length;
      }
      return half.empty() ? Status() : file_->write(half, offset);
    }

    HookedFiles& layer_;
    std::string path_;
    std::unique_ptr<File> file_;
  };

  template <typename Call>
  Status hooked(const char* name, const std::string& path, Call call) {
    if (const auto failed = failure(name)) return *failed;
    KVSTRATA_RETURN_IF_ERROR(before(name, path));
    const Status status = call();
    after(name, path);
    return status;
  }

  std::optional<Status> failure(const std::string& call) {
    const std::lock_guard lock(mutex_);
    const auto found = failing_.find(call);
    if (found == failing_.end()) return std::nullopt;
    return Status(StatusCode::kOsError, "injected", found->second);
  }

  FileLayer& inner_;
  std::mutex mutex_;
  std::map<std::string, int> failing_;
};

}  // namespace kvstrata::testing
