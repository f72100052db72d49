// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// SparseFiles: files in memory that keep the blocks with something in them; blocks of zeros take no
// room. A medium whose records have payloads of zeros runs on it whole, headers, tables and
// checksums included, with a few blocks a record whatever the record's length is.
//
// Nothing is ever lost and sync does nothing: see volatile_files.h for what a power cut leaves.
// There is always space. Thread-safe. The layer may end before its files.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "files/files.h"

namespace kvstrata::testing {

class SparseFiles final : public FileLayer {
 public:
  // Bytes in memory, of all files that are there.
  std::uint64_t kept_bytes() const {
    const std::lock_guard lock(mutex_);
    std::uint64_t bytes = 0;
    for (const auto& [path, node] : nodes_) {
      const std::lock_guard of_node(node->mutex);
      bytes += node->blocks.size() * kFileBlockBytes;
    }
    return bytes;
  }

  Status open(const std::string& path, FileMode mode, bool direct,
              std::unique_ptr<File>* out) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(path);
    if (mode == FileMode::kCreate) {
      if (found != nodes_.end()) return failed("open", EEXIST);
      KVSTRATA_RETURN_IF_ERROR(check_parent(path));
      out->reset(new SparseFile(nodes_[path] = std::make_shared<Node>(), direct));
      return Status();
    }
    if (found == nodes_.end()) return failed("open", ENOENT);
    if (found->second->is_folder) return failed("open", EISDIR);
    out->reset(new SparseFile(found->second, direct));
    return Status();
  }

  Status rename(const std::string& from, const std::string& to) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(from);
    if (found == nodes_.end()) return failed("rename", ENOENT);
    KVSTRATA_RETURN_IF_ERROR(check_parent(to));
    const std::shared_ptr<Node> node = found->second;
    if (node->is_folder) return failed("rename", EISDIR);
    nodes_.erase(found);
    nodes_[to] = node;
    return Status();
  }

  Status unlink(const std::string& path) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(path);
    if (found == nodes_.end()) return failed("unlink", ENOENT);
    if (found->second->is_folder) return failed("unlink", EISDIR);
    nodes_.erase(found);
    return Status();
  }

  Status make_folder(const std::string& path) noexcept override {
    const std::lock_guard lock(mutex_);
    if (nodes_.contains(path)) return failed("mkdir", EEXIST);
    KVSTRATA_RETURN_IF_ERROR(check_parent(path));
    nodes_[path] = std::make_shared<Node>(true);
    return Status();
  }

  Status sync_folder(const std::string& path) noexcept override {
    const std::lock_guard lock(mutex_);
    return check_folder(path);
  }

  Status stat(const std::string& path, FileStat* out) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(path);
    if (found == nodes_.end()) return failed("stat", ENOENT);
    const std::lock_guard of_node(found->second->mutex);
    *out = found->second->stat();
    return Status();
  }

  Status list(const std::string& path, std::vector<FolderEntry>* out) noexcept override {
    const std::lock_guard lock(mutex_);
    KVSTRATA_RETURN_IF_ERROR(check_folder(path));
    out->clear();
    for (const auto& [name, node] : nodes_) {
      if (name == path || parent_of(name) != path) continue;
      out->push_back({.name = name.substr(name.rfind('/') + 1),
                      .is_file = !node->is_folder,
                      .is_folder = node->is_folder});
    }
    return Status();
  }

  Status space(const std::string& path, FileSpace* out) noexcept override {
    const std::lock_guard lock(mutex_);
    *out = FileSpace{.total_bytes = std::uint64_t{1} << 60, .free_bytes = std::uint64_t{1} << 60};
    return check_folder(path);
  }

  Status lock_folder(const std::string& path, std::unique_ptr<FileLock>* out,
                     std::string* holder) noexcept override {
    return lock(path, out, holder);
  }

  Status lock(const std::string& path, std::unique_ptr<FileLock>* out,
              std::string* holder) noexcept override {
    const std::lock_guard lock(mutex_);
    KVSTRATA_RETURN_IF_ERROR(check_parent(path));
    std::shared_ptr<Node>& node = nodes_[path];
    if (node == nullptr) node = std::make_shared<Node>();
    if (const std::shared_ptr<SparseLock::Note> note = node->locked.lock()) {
      *holder = note->text;
      return Status(StatusCode::kBusy, "locked");
    }
    const auto note = std::make_shared<SparseLock::Note>();
    node->locked = note;
    out->reset(new SparseLock(note));
    return Status();
  }

 private:
  using Block = std::array<unsigned char, kFileBlockBytes>;

  class SparseLock final : public FileLock {
   public:
    struct Note {
      std::string text;
    };
    explicit SparseLock(std::shared_ptr<Note> note) : note_(std::move(note)) {}
    void note(const std::string& text) noexcept override { note_->text = text; }

   private:
    const std::shared_ptr<Note> note_;
  };

  struct Node {
    explicit Node(bool folder = false) : is_folder(folder) {}
    const bool is_folder;
    std::mutex mutex;
    std::map<std::uint64_t, std::unique_ptr<Block>> blocks;  // by number; those with something
    std::uint64_t length = 0;
    std::int64_t accessed_unix_ns = 0;
    std::weak_ptr<SparseLock::Note> locked;

    FileStat stat() const {
      return {.is_file = !is_folder,
              .is_folder = is_folder,
              .length = length,
              .accessed_unix_ns = accessed_unix_ns};
    }
  };

  class SparseFile final : public File {
   public:
    SparseFile(std::shared_ptr<Node> node, bool direct) : node_(std::move(node)), direct_(direct) {}

    Status read(std::span<const ReadPart> parts, std::uint64_t offset) noexcept override {
      KVSTRATA_RETURN_IF_ERROR(check(parts, offset));
      const std::lock_guard lock(node_->mutex);
      for (const ReadPart& part : parts) {
        if (part.length == 0) continue;
        if (offset + part.length > node_->length)
          return Status(StatusCode::kOutOfRange, "read: the file ends before");
        auto* const bytes = static_cast<unsigned char*>(part.bytes);
        std::memset(bytes, 0, part.length);
        const std::uint64_t end = offset + part.length;
        for (auto at = node_->blocks.lower_bound(offset / kFileBlockBytes);
             at != node_->blocks.end() && at->first * kFileBlockBytes < end; ++at) {
          const std::uint64_t begin_of_block = at->first * kFileBlockBytes;
          const std::uint64_t from = std::max(offset, begin_of_block);
          const std::uint64_t to = std::min(end, begin_of_block + kFileBlockBytes);
          std::memcpy(bytes + (from - offset), at->second->data() + (from - begin_of_block),
                      to - from);
        }
        offset = end;
      }
      return Status();
    }

    Status write(std::span<const WritePart> parts, std::uint64_t offset) noexcept override {
      KVSTRATA_RETURN_IF_ERROR(check(parts, offset));
      const std::lock_guard lock(node_->mutex);
      for (const WritePart& part : parts) {
        const auto* bytes = static_cast<const unsigned char*>(part.bytes);
        for (const std::uint64_t end = offset + part.length; offset < end;) {
          const std::uint64_t in_block = offset % kFileBlockBytes;
          const std::uint64_t length = std::min(kFileBlockBytes - in_block, end - offset);
          write_block(offset / kFileBlockBytes, in_block, bytes, length);
          bytes += length;
          offset += length;
        }
        node_->length = std::max(node_->length, offset);
      }
      return Status();
    }

    Status sync() noexcept override { return Status(); }

    Status allocate(std::uint64_t length) noexcept override {
      const std::lock_guard lock(node_->mutex);
      node_->length = std::max(node_->length, length);
      return Status();
    }

    Status truncate(std::uint64_t length) noexcept override {
      const std::lock_guard lock(node_->mutex);
      node_->length = length;
      const std::uint64_t rest = length % kFileBlockBytes;
      node_->blocks.erase(
          node_->blocks.lower_bound((length + kFileBlockBytes - 1) / kFileBlockBytes),
          node_->blocks.end());
      const auto last = node_->blocks.find(length / kFileBlockBytes);
      if (last != node_->blocks.end())
        std::fill(last->second->begin() + rest, last->second->end(), 0);
      return Status();
    }

    Status stat(FileStat* out) noexcept override {
      const std::lock_guard lock(node_->mutex);
      *out = node_->stat();
      return Status();
    }

    Status set_access_time(std::int64_t unix_ns) noexcept override {
      const std::lock_guard lock(node_->mutex);
      node_->accessed_unix_ns = unix_ns;
      return Status();
    }

    bool direct() const noexcept override { return direct_; }

   private:
    template <typename Part>
    Status check(std::span<const Part> parts, std::uint64_t offset) const noexcept {
      std::uint64_t length = 0;
      for (const Part& part : parts)
        length += part.length;
      if (direct_ && (offset % kFileBlockBytes != 0 || length % kFileBlockBytes != 0))
        return Status(StatusCode::kBadArgument, "not in whole blocks");
      return Status();
    }

    // REQUIRES: the node's mutex; within one block.
    void write_block(std::uint64_t number, std::uint64_t at, const unsigned char* bytes,
                     std::uint64_t length) {
      const bool zeros = bytes[0] == 0 && std::memcmp(bytes, bytes + 1, length - 1) == 0;
      if (zeros && length == kFileBlockBytes) {
        node_->blocks.erase(number);
        return;
      }
      const auto found = node_->blocks.find(number);
      if (zeros && found == node_->blocks.end()) return;
      std::unique_ptr<Block>& block =
          found != node_->blocks.end() ? found->second : node_->blocks[number];
      if (block == nullptr) block = std::make_unique<Block>();
      std::memcpy(block->data() + at, bytes, length);
    }

    const std::shared_ptr<Node> node_;
    const bool direct_;
  };

  static Status failed(const char* call, int error) noexcept {
    return Status(StatusCode::kOsError, call, error);
  }

  static std::string parent_of(const std::string& path) {
    const std::size_t at = path.rfind('/');
    return at == 0 ? "/" : path.substr(0, at);
  }

  // REQUIRES: mutex_.
  Status check_folder(const std::string& path) const noexcept {
    const auto found = nodes_.find(path);
    if (found == nodes_.end()) return failed("folder", ENOENT);
    return found->second->is_folder ? Status() : failed("folder", ENOTDIR);
  }
  Status check_parent(const std::string& path) const noexcept {
    return check_folder(parent_of(path));
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Node>> nodes_{{"/", std::make_shared<Node>(true)}};
};

}  // namespace kvstrata::testing
