// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The stories of power_loss.h find what they are there for: on the smallest connector that keeps
// its promises nothing, on each of those that leave one thing out that thing.
#include "support/power_loss.h"

#include <cerrno>
#include <condition_variable>
#include <list>

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// What a connector can get wrong.
enum class Bug {
  kNone,
  kNoFileSync,
  kNoFolderSync,
  kDeleteWithoutSync,
  kTrustsSizes,  // writes under the final name, and takes at the start whatever is there
  kTrustsFound,  // does not sync at the start what a process before has renamed
  kNoKeyCheck,   // finds records by a part of their key
  kEvictsInSilence,
  kRenamesFirst,  // syncs a record's bytes after it has its name
};

// <base>/<hex>: a record. <base>/<hex>.part: one being written.
class Flat final : public Connector {
 public:
  Flat(FileLayer& files, std::uint64_t capacity_bytes, Bug bug)
      : files_(files), capacity_bytes_(capacity_bytes), bug_(bug) {}

  ConnectorCapabilities capabilities() const noexcept override {
    return {.persistent = true, .can_clear = true, .max_batch = 4, .items_per_piece = 2};
  }

  std::string open(const ConnectorContext&) override {
    const Status made = files_.make_folder(base_);
    if (!made.ok() && made.detail(0) != EEXIST) return describe_file_error(base_, made);
    // Also of a folder that was found: who made it may have died before.
    if (const Status status = files_.sync_folder(kPowerLossFolder); !status.ok())
      return describe_file_error(base_, status);
    std::vector<FolderEntry> entries;
    if (const Status status = files_.list(base_, &entries); !status.ok())
      return describe_file_error(base_, status);
    for (const FolderEntry& entry : entries) {
      if (entry.name.ends_with(".part")) {
        if (const Status status = files_.unlink(base_ + "/" + entry.name); !status.ok())
          return describe_file_error(entry.name, status);
        continue;
      }
      FileStat found;
      if (const Status status = files_.stat(base_ + "/" + entry.name, &found); !status.ok())
        return describe_file_error(entry.name, status);
      if (found.length > 0) add(entry.name, static_cast<std::uint32_t>(found.length));
    }
    if (!make_room(0)) return "eviction failed";
    if (bug_ != Bug::kTrustsFound)
      if (const Status status = files_.sync_folder(base_); !status.ok())
        return describe_file_error(base_, status);
    return "";
  }

  void exists(std::span<ExistsItem> items) noexcept override {
    const std::lock_guard lock(mutex_);
    for (ExistsItem& item : items) {
      const auto found = index_.find(name_of(item.key));
      item.presence = found == index_.end() ? Presence::kAbsent : Presence::kPresent;
      item.record_bytes = found == index_.end() ? 0 : found->second;
    }
  }

  void put(std::span<PutItem> piece) noexcept override {
    const std::lock_guard lock(mutex_);
    for (PutItem& item : piece) {
      put_one(&item);
      item.hold.reset();
    }
  }

  void put_end(std::span<PutItem> batch) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto acknowledges = [&](const PutItem& item) {
      return item.status == PutStatus::kStored || item.status == PutStatus::kExists;
    };
    if (bug_ == Bug::kNoFolderSync) return;
    if (std::none_of(batch.begin(), batch.end(), acknowledges)) return;
    if (files_.sync_folder(base_).ok()) return;
    for (PutItem& item : batch)
      if (acknowledges(item)) item.status = PutStatus::kFailed;
  }

  void load(std::span<LoadItem> piece) noexcept override {
    const std::lock_guard lock(mutex_);
    for (LoadItem& item : piece) {
      item.status = load_one(item);
      item.hold.reset();
    }
  }

  void remove(std::span<DeleteItem> items) noexcept override {
    const std::lock_guard lock(mutex_);
    for (DeleteItem& item : items) {
      const std::string name = name_of(item.key);
      const auto found = index_.find(name);
      if (found == index_.end()) continue;
      used_bytes_ -= found->second;
      index_.erase(found);
      ages_.remove(name);
      item.removed = drop(name);
    }
  }

  std::uint64_t clear() noexcept override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t removed = index_.size();
    for (const auto& [name, length] : index_)
      static_cast<void>(drop(name));
    index_.clear();
    ages_.clear();
    used_bytes_ = 0;
    return removed;
  }

  ConnectorUsage usage() noexcept override {
    const std::lock_guard lock(mutex_);
    return {used_bytes_, capacity_bytes_, index_.size()};
  }

  void take_evicted(std::vector<Digest>* keys) noexcept override {
    const std::lock_guard lock(mutex_);
    keys->swap(evicted_);
    evicted_.clear();
    if (bug_ == Bug::kEvictsInSilence) keys->clear();
  }

  void close() noexcept override {}

 private:
  std::string name_of(const Digest& key) const {
    std::string name;
    for (const unsigned char byte : key) {
      name += "0123456789abcdef"[byte >> 4];
      if (bug_ == Bug::kNoKeyCheck) break;
      name += "0123456789abcdef"[byte & 15];
    }
    return name;
  }

  void add(const std::string& name, std::uint32_t length) {
    index_[name] = length;
    ages_.push_back(name);
    used_bytes_ += length;
  }

  bool drop(const std::string& name) {
    bool durable = files_.unlink(base_ + "/" + name).ok();
    if (bug_ != Bug::kDeleteWithoutSync) durable = files_.sync_folder(base_).ok() && durable;
    return durable;
  }

  // Oldest first. A name whose removal was not synced may come back: then there is too much at the
  // start.
  bool make_room(std::uint32_t more) {
    while (capacity_bytes_ != 0 && used_bytes_ + more > capacity_bytes_ && !ages_.empty()) {
      const std::string oldest = ages_.front();
      ages_.pop_front();
      used_bytes_ -= index_.at(oldest);
      index_.erase(oldest);
      evicted_.push_back(digest_of(oldest));
      if (!files_.unlink(base_ + "/" + oldest).ok()) return false;
    }
    return true;
  }

  void put_one(PutItem* item) {
    const std::string name = name_of(item->key);
    item->status = PutStatus::kExists;
    if (index_.contains(name)) return;
    item->status = PutStatus::kFailed;
    if (!make_room(item->length)) return;
    const std::string path = base_ + "/" + name;
    const std::string part = bug_ == Bug::kTrustsSizes ? path : path + ".part";
    std::unique_ptr<File> file;
    Status status = files_.open(part, FileMode::kCreate, false, &file);
    const WritePart parts[] = {{item->bytes, item->length}};
    if (status.ok()) status = file->write(parts, 0);
    if (status.ok() && bug_ != Bug::kNoFileSync && bug_ != Bug::kRenamesFirst)
      status = file->sync();
    if (status.ok() && bug_ != Bug::kTrustsSizes) status = files_.rename(part, path);
    if (status.ok() && bug_ == Bug::kRenamesFirst) status = file->sync();
    if (!status.ok()) return;
    add(name, item->length);
    item->status = PutStatus::kStored;
  }

  static Digest digest_of(const std::string& name) {
    Digest digest{};
    for (std::size_t i = 0; i < digest.size(); ++i)
      digest[i] = static_cast<unsigned char>(std::stoul(name.substr(2 * i, 2), nullptr, 16));
    return digest;
  }

  LoadStatus load_one(const LoadItem& item) {
    const std::string name = name_of(item.key);
    const auto found = index_.find(name);
    if (found == index_.end()) return LoadStatus::kAbsent;
    if (found->second != item.length) return LoadStatus::kCorrupt;
    std::unique_ptr<File> file;
    if (!files_.open(base_ + "/" + name, FileMode::kRead, false, &file).ok())
      return LoadStatus::kFailed;
    const ReadPart parts[] = {{item.bytes, item.length}};
    return file->read(parts, 0).ok() ? LoadStatus::kLoaded : LoadStatus::kFailed;
  }

  FileLayer& files_;
  const std::uint64_t capacity_bytes_;
  const Bug bug_;
  const std::string base_ = std::string(kPowerLossFolder) + "/flat";
  std::mutex mutex_;
  std::map<std::string, std::uint32_t> index_;
  std::list<std::string> ages_;  // oldest first
  std::vector<Digest> evicted_;
  std::uint64_t used_bytes_ = 0;
};

MakeConnector flat(Bug bug, std::uint64_t capacity_bytes = 0) {
  return [=](FileLayer& files) { return std::make_unique<Flat>(files, capacity_bytes, bug); };
}

// The first broken promise within so many stories.
std::optional<std::string> found(Bug bug, std::uint64_t capacity_bytes = 0) {
  return tell_some(flat(bug, capacity_bytes), {}, 1, 300);
}

constexpr std::uint64_t kCapacity = 60'000;  // some four records of the stories

TEST(a_connector_that_keeps_its_promises_passes) {
  check_power_loss(flat(Bug::kNone));
}

TEST(a_connector_that_is_used_by_threads_passes) {
  check_power_loss(flat(Bug::kNone), {.threads = 3, .whole_seeds = 0, .random_stories = 40});
  check_power_loss(flat(Bug::kNone, kCapacity),
                   {.threads = 3, .whole_seeds = 0, .random_stories = 40});
}

void check_caught(Bug bug, const std::string& by, std::uint64_t capacity_bytes = 0) {
  const std::optional<std::string> broken = found(bug, capacity_bytes);
  if (!broken) fail(__FILE__, __LINE__, "not caught: expected " + by);
  if (broken->find(by) == std::string::npos) fail(__FILE__, __LINE__, "caught by " + *broken);
}

TEST(each_bug_is_caught_by_the_promise_that_it_breaks) {
  check_caught(Bug::kNoFileSync, "");
  check_caught(Bug::kNoFolderSync, "ABSENT");
  check_caught(Bug::kDeleteWithoutSync, "PRESENT");
  check_caught(Bug::kTrustsSizes, "");
  check_caught(Bug::kTrustsFound, "ABSENT");
  check_caught(Bug::kNoKeyCheck, "key");
  check_caught(Bug::kEvictsInSilence, "ABSENT", kCapacity);
  check_caught(Bug::kRenamesFirst, "");
}

TEST(each_sync_of_a_right_connector_is_missed_when_left_out) {
  check_every_sync_matters(flat(Bug::kNone));
}

}  // namespace
