// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What a VolatileFiles and its files share: the medium with its volatile cache, and the steps until
// it stops. Included by volatile_files.cpp alone.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/volatile_files.h"

namespace kvstrata::testing {

inline constexpr std::uint64_t kTornBytes = 512;
inline constexpr std::size_t kMaxParts = 8;  // as of posix_files()
inline constexpr std::size_t kMaxName = 255;
inline constexpr int kNone = -1;

inline Status error(int number) {
  return Status(StatusCode::kOsError, "volatile", number);
}

// Bytes of a file, in blocks that copies share until they are written.
class Content {
 public:
  using Block = std::array<unsigned char, kFileBlockBytes>;

  std::uint64_t length() const { return length_; }
  // Blocks that are reserved or were written.
  std::uint64_t blocks() const { return reserved_ + beyond_; }
  bool has_block(std::uint64_t index) const { return index < reserved_ || blocks_.contains(index); }

  // Zeros beyond the end.
  void read(std::uint64_t offset, std::span<unsigned char> out) const {
    while (!out.empty()) {
      const std::uint64_t within = offset % kFileBlockBytes;
      const std::size_t take = std::min<std::uint64_t>(out.size(), kFileBlockBytes - within);
      const auto found = blocks_.find(offset / kFileBlockBytes);
      if (found == blocks_.end())
        std::memset(out.data(), 0, take);
      else
        std::memcpy(out.data(), found->second->data() + within, take);
      out = out.subspan(take);
      offset += take;
    }
  }

  void write(std::uint64_t offset, std::span<const unsigned char> bytes) {
    while (!bytes.empty()) {
      const std::uint64_t within = offset % kFileBlockBytes;
      const std::size_t take = std::min<std::uint64_t>(bytes.size(), kFileBlockBytes - within);
      std::memcpy(own(offset / kFileBlockBytes).data() + within, bytes.data(), take);
      bytes = bytes.subspan(take);
      offset += take;
      length_ = std::max(length_, offset);
    }
  }

  void grow(std::uint64_t length) { length_ = std::max(length_, length); }

  void reserve(std::uint64_t length) {
    grow(length);
    reserved_ = std::max(reserved_, (length + kFileBlockBytes - 1) / kFileBlockBytes);
    beyond_ =
        static_cast<std::uint64_t>(std::distance(blocks_.lower_bound(reserved_), blocks_.end()));
  }

  void truncate(std::uint64_t length) {
    if (length < length_) {
      const std::uint64_t kept = (length + kFileBlockBytes - 1) / kFileBlockBytes;
      blocks_.erase(blocks_.lower_bound(kept), blocks_.end());
      reserved_ = std::min(reserved_, kept);
      beyond_ =
          static_cast<std::uint64_t>(std::distance(blocks_.lower_bound(reserved_), blocks_.end()));
      const std::uint64_t within = length % kFileBlockBytes;
      if (within != 0 && blocks_.contains(length / kFileBlockBytes)) {
        Block& last = own(length / kFileBlockBytes);
        std::fill(last.begin() + static_cast<std::ptrdiff_t>(within), last.end(), 0);
      }
    }
    length_ = length;
  }

 private:
  Block& own(std::uint64_t index) {
    std::shared_ptr<Block>& block = blocks_[index];
    if (block == nullptr) {
      block = std::make_shared<Block>();
      if (index >= reserved_) ++beyond_;
    } else if (block.use_count() > 1) {
      block = std::make_shared<Block>(*block);
    }
    return *block;
  }

  std::uint64_t length_ = 0;
  std::uint64_t reserved_ = 0;  // blocks from the start on
  std::uint64_t beyond_ = 0;    // blocks behind those
  std::map<std::uint64_t, std::shared_ptr<Block>> blocks_;
};

// Something done to a file that is not durable.
struct Change {
  enum class Kind : std::uint8_t { kWrite, kAllocate, kTruncate };
  enum class Fate : std::uint8_t {
    kOpen,     // the next sync makes it durable
    kLost,     // none does
    kDurable,  // but follows one that is lost
  };
  Kind kind;
  std::uint64_t at = 0;  // offset of a write, else the length
  std::shared_ptr<const std::vector<unsigned char>> bytes;
  Fate fate = Fate::kOpen;

  void apply(Content* content) const {
    switch (kind) {
      case Kind::kWrite:
        content->write(at, *bytes);
        break;
      case Kind::kAllocate:
        content->reserve(at);
        break;
      case Kind::kTruncate:
        content->truncate(at);
        break;
    }
  }
};

// That a name in a folder has taken at least this step.
struct Need {
  int folder;
  std::string name;
  std::uint64_t id;
};

// What a name stands for from here on.
struct Naming {
  std::uint64_t id;
  int inode;  // or kNone
  std::vector<Need> needs;
};

struct Inode {
  bool is_folder = false;
  int links = 0;  // names
  int opens = 0;
  std::int64_t modified_unix_ns = 0;
  std::int64_t accessed_unix_ns = 0;

  Content content;  // as read
  Content durable;
  std::vector<Change> changes;  // content is durable with all of these
  unsigned locks = 0;           // one, or several shared ones
  std::string note;

  std::map<std::string, int> names;  // as listed
  std::map<std::string, int> durable_names;
  std::map<std::string, std::vector<Naming>> namings;
  int parent = 0;
  std::optional<Need> named_by;
};

struct Place {
  int folder = kNone;
  std::string name;
  int inode = kNone;
};

// How many of the namings of a name in a folder are kept.
using Namings = std::map<std::pair<int, std::string>, std::size_t>;

// One run of the machine. Everything but its mutex is guarded by that.
struct VolatileFiles::Machine {
  Machine(VolatileOptions machine_options, std::shared_ptr<SyncSites> sync_sites)
      : options(machine_options), sites(std::move(sync_sites)) {}

  std::mutex mutex;
  VolatileOptions options;
  std::shared_ptr<SyncSites> sites;
  std::deque<Inode> inodes;  // [0] is "/"
  std::uint64_t used_blocks = 0;
  std::uint64_t next_id = 1;
  std::int64_t now_unix_ns = 1'700'000'000'000'000'000;
  std::uint64_t steps = 0;
  std::uint64_t last_step = 0;  // 0: none
  bool stopped = false;
  Random random{0};
  std::vector<std::string> trace;

  // Takes one step. The last one happens or not, and is an error in any case.
  template <typename Do>
  Status step(const char* what, const std::string& path, Do&& act) {
    bool partly = false;
    KVSTRATA_RETURN_IF_ERROR(begin_step(what, path, &partly));
    if (!partly) return act();
    if (random.chance(50)) static_cast<void>(act());
    return error(EIO);
  }

  Status begin_step(const char* what, const std::string& path, bool* is_last) {
    if (stopped) return error(EIO);
    ++steps;
    now_unix_ns += 1'000'000;
    if (options.traces) trace.push_back(std::to_string(steps) + " " + what + " " + path);
    *is_last = stopped = steps == last_step;
    return Status();
  }

  FileStat told(int at) const {
    const Inode& inode = inodes[static_cast<std::size_t>(at)];
    return {.is_file = !inode.is_folder,
            .is_folder = inode.is_folder,
            .length = inode.content.length(),
            .device = 1,
            .inode = static_cast<std::uint64_t>(at) + 1,
            .modified_unix_ns = inode.modified_unix_ns,
            .accessed_unix_ns = inode.accessed_unix_ns};
  }

  std::uint64_t free_blocks() const {
    const std::uint64_t total = options.total_bytes / kFileBlockBytes;
    return total - std::min(total, used_blocks);
  }

  Status find(const std::string& path, Place* out) const {
    if (path.empty() || path[0] != '/') return error(EINVAL);
    *out = {.folder = 0, .name = "", .inode = 0};
    std::size_t at = 0;
    while (at < path.size()) {
      const std::size_t begin = path.find_first_not_of('/', at);
      if (begin == std::string::npos) break;
      const std::size_t end = std::min(path.find('/', begin), path.size());
      if (out->inode < 0) return error(ENOENT);
      if (!inodes[out->inode].is_folder) return error(ENOTDIR);
      out->folder = out->inode;
      out->name = path.substr(begin, end - begin);
      if (out->name.size() > kMaxName) return error(ENAMETOOLONG);
      const auto& names = inodes[out->folder].names;
      const auto found = names.find(out->name);
      out->inode = found == names.end() ? kNone : found->second;
      at = end;
    }
    return Status();
  }

  // Returns the naming's id.
  std::uint64_t name(int folder, const std::string& name, int inode) {
    Inode& in = inodes[folder];
    const auto found = in.names.find(name);
    if (inode != kNone) {
      ++inodes[inode].links;
      inodes[inode].parent = folder;
      inodes[inode].named_by = Need{folder, name, next_id};
    }
    if (found != in.names.end()) {
      const int before = found->second;
      --inodes[before].links;
      release(before);
    }
    if (inode == kNone)
      in.names.erase(name);
    else
      in.names[name] = inode;
    in.namings[name].push_back({.id = next_id, .inode = inode, .needs = {}});
    return next_id++;
  }

  int make(const Place& place, bool is_folder) {
    const int inode = static_cast<int>(inodes.size());
    Inode& made = inodes.emplace_back();
    made.is_folder = is_folder;
    made.modified_unix_ns = made.accessed_unix_ns = now_unix_ns;
    name(place.folder, place.name, inode);
    return inode;
  }

  void move(const Place& source, const Place& target) {
    const std::uint64_t came = name(target.folder, target.name, source.inode);
    const Need there{target.folder, target.name, came};
    const std::uint64_t went = name(source.folder, source.name, kNone);
    inodes[source.folder].namings[source.name].back().needs.push_back(there);
    // A folder has one name.
    if (inodes[source.inode].is_folder)
      inodes[target.folder].namings[target.name].back().needs.push_back(
          {source.folder, source.name, went});
  }

  // Blocks of a file that has neither a name nor anybody who has it open are free.
  void release(int index) {
    Inode& inode = inodes[index];
    if (inode.links > 0 || inode.opens > 0) return;
    used_blocks -= inode.content.blocks();
    inode.content = Content();
  }

  void change(Inode* inode, Change change) {
    const std::uint64_t before = inode->content.blocks();
    change.apply(&inode->content);
    used_blocks = used_blocks - before + inode->content.blocks();
    inode->modified_unix_ns = now_unix_ns;
    inode->changes.push_back(std::move(change));
  }

  // Of a change list what is durable, up to the first that is lost.
  static void settle_file(Inode* inode) {
    std::size_t done = 0;
    bool lost = false;
    for (Change& change : inode->changes) {
      if (change.fate == Change::Fate::kOpen) change.fate = Change::Fate::kDurable;
      lost = lost || change.fate == Change::Fate::kLost;
      if (lost) continue;
      change.apply(&inode->durable);
      ++done;
    }
    inode->changes.erase(inode->changes.begin(),
                         inode->changes.begin() + static_cast<std::ptrdiff_t>(done));
  }

  // Adds what is needed by what is kept, with the names of the folder that it is in if `to_root`.
  // Whether anything was added.
  bool require(const Need& need, bool to_root, Namings* kept) const {
    const Inode& folder = inodes[need.folder];
    bool added = to_root && folder.named_by && require(*folder.named_by, true, kept);
    const auto namings = folder.namings.find(need.name);
    if (namings == folder.namings.end()) return added;
    for (std::size_t i = 0; i < namings->second.size(); ++i) {
      if (namings->second[i].id != need.id) continue;
      std::size_t& count = (*kept)[{need.folder, need.name}];
      added = added || count <= i;
      count = std::max(count, i + 1);
    }
    return added;
  }

  void close_over(Namings* kept) const {
    for (bool added = true; added;) {
      added = false;
      for (const auto& [at, count] : Namings(*kept)) {
        const std::vector<Naming>& namings = inodes[at.first].namings.at(at.second);
        for (std::size_t i = 0; i < count; ++i)
          for (const Need& need : namings[i].needs)
            added = require(need, need.folder != at.first, kept) || added;
      }
    }
  }

  // Makes namings durable.
  void settle_names(const Namings& kept) {
    for (const auto& [at, count] : kept) {
      if (count == 0) continue;
      Inode& folder = inodes[at.first];
      std::vector<Naming>& namings = folder.namings.at(at.second);
      const int inode = namings[count - 1].inode;
      if (inode == kNone)
        folder.durable_names.erase(at.second);
      else
        folder.durable_names[at.second] = inode;
      namings.erase(namings.begin(), namings.begin() + static_cast<std::ptrdiff_t>(count));
      if (namings.empty()) folder.namings.erase(at.second);
    }
  }

  void settle_folder(int folder) {
    Namings kept;
    for (const auto& [name, namings] : inodes[folder].namings)
      kept[{folder, name}] = namings.size();
    close_over(&kept);
    settle_names(kept);
  }

  // The power went.
  void lose(Kept kept, Random chance) {
    lose_names(kept, &chance);
    std::set<int> reachable = {0};
    std::vector<int> unvisited = {0};
    for (Inode& inode : inodes) {
      inode.links = 0;
      inode.names = inode.durable_names;
      inode.namings.clear();
      inode.named_by.reset();
    }
    inodes[0].links = 1;
    while (!unvisited.empty()) {
      const int folder = unvisited.back();
      unvisited.pop_back();
      for (const auto& [name, inode] : inodes[folder].names) {
        ++inodes[inode].links;
        inodes[inode].parent = folder;
        if (reachable.insert(inode).second) unvisited.push_back(inode);
      }
    }
    used_blocks = 0;
    for (std::size_t i = 0; i < inodes.size(); ++i) {
      if (!reachable.contains(static_cast<int>(i))) {
        inodes[i] = Inode();
        continue;
      }
      lose_data(&inodes[i], kept, &chance);
      used_blocks += inodes[i].content.blocks();
    }
  }

  void lose_names(Kept kept, Random* chance) {
    Namings chosen;
    const std::uint64_t mood = kept == Kept::kRandom ? chance->below(4) : 0;
    for (std::size_t folder = 0; folder < inodes.size(); ++folder) {
      for (const auto& [name, namings] : inodes[folder].namings) {
        std::size_t count = namings.size();
        if (kept == Kept::kNothing || kept == Kept::kData || mood == 1) count = 0;
        if (mood >= 2) count = chance->below(namings.size() + 1);
        chosen[{static_cast<int>(folder), name}] = count;
      }
    }
    close_over(&chosen);
    settle_names(chosen);
  }

  static void lose_data(Inode* inode, Kept kept, Random* chance) {
    enum { kNo, kAll, kLengths, kWhole, kTorn } mood = kNo;
    unsigned percent = 50;  // of the pieces that are kept
    if (kept == Kept::kEverything || kept == Kept::kData) mood = kAll;
    if (kept == Kept::kNamesAndLengths) mood = kLengths;
    if (kept == Kept::kRandom) {
      mood = std::array{kNo, kAll, kLengths, kWhole, kTorn, kTorn, kTorn}[chance->below(7)];
      if (mood == kTorn) percent = std::array{3U, 50U, 97U}[chance->below(3)];
    }
    for (const Change& change : inode->changes) {
      const bool whole = change.fate == Change::Fate::kDurable || mood == kAll ||
                         (mood == kWhole && chance->chance(50));
      if (whole) {
        change.apply(&inode->durable);
      } else if (change.kind == Change::Kind::kWrite) {
        if (mood == kTorn) tear(change, percent, &inode->durable, chance);
        const std::uint64_t end = change.at + change.bytes->size();
        const bool one_block = change.at / kTornBytes == (end - 1) / kTornBytes;
        if (!one_block && (mood == kLengths || (mood == kTorn && chance->chance(50))))
          inode->durable.grow(end);
      } else if (mood == kLengths || (mood == kTorn && chance->chance(percent))) {
        change.apply(&inode->durable);
      }
    }
    inode->changes.clear();
    inode->content = inode->durable;
    // Access times were in the cache only.
    inode->accessed_unix_ns = inode->modified_unix_ns;
  }

  static void tear(const Change& change, unsigned percent, Content* content, Random* chance) {
    const std::span<const unsigned char> bytes(*change.bytes);
    for (std::uint64_t done = 0; done < bytes.size();) {
      const std::uint64_t at = change.at + done;
      const std::uint64_t take =
          std::min<std::uint64_t>(bytes.size() - done, kTornBytes - at % kTornBytes);
      if (chance->chance(percent)) content->write(at, bytes.subspan(done, take));
      done += take;
    }
  }
};

}  // namespace kvstrata::testing
