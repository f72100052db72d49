// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "volatile_files.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <span>

namespace kvstrata::testing {

namespace {

constexpr std::uint64_t kTornBytes = 512;
constexpr std::size_t kMaxParts = 8;  // as of posix_files()
constexpr std::size_t kMaxName = 255;
constexpr int kNone = -1;

Status error(int number) {
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
  bool shared_locks = false;
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

}  // namespace

void SyncSites::begin_here() {
  std::array<void*, 64> frames{};
  outer_frames_ = ::backtrace(frames.data(), static_cast<int>(frames.size())) - 2;
}

std::size_t SyncSites::count() {
  const std::lock_guard lock(mutex_);
  return sites_.size();
}

void SyncSites::forget(std::optional<std::size_t> index) {
  const std::lock_guard lock(mutex_);
  forgotten_ = index;
}

std::uint64_t SyncSites::forgotten_calls() {
  const std::lock_guard lock(mutex_);
  return forgotten_calls_;
}

std::string SyncSites::describe(std::size_t index) {
  std::vector<void*> site;
  {
    const std::lock_guard lock(mutex_);
    site = sites_.at(index);
  }
  std::string text;
  for (void* const address : site)
    text += (text.empty() ? "" : " < ") + describe_address(address);
  return text;
}

bool SyncSites::reached(void* caller) {
  std::vector<void*> site = {caller};
  if (depth_ > 1) add_callers(&site);
  const std::lock_guard lock(mutex_);
  auto found = std::find(sites_.begin(), sites_.end(), site);
  if (found == sites_.end()) found = sites_.insert(found, std::move(site));
  if (forgotten_ != static_cast<std::size_t>(found - sites_.begin())) return true;
  ++forgotten_calls_;
  return false;
}

void SyncSites::add_callers(std::vector<void*>* site) const {
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  const auto end = frames.begin() + std::max(0, count - outer_frames_);
  auto at = std::find(frames.begin(), end, site->front());
  while (at != end && ++at != end && site->size() < depth_)
    site->push_back(*at);
}

std::string SyncSites::describe_address(void* address) {
  Dl_info found{};
  char text[64];
  std::snprintf(text, sizeof text, "%p", address);
  if (::dladdr(address, &found) == 0) return text;
  // The instruction before the one that is returned to.
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(address) - 1 -
                            reinterpret_cast<std::uintptr_t>(found.dli_fbase);
  char command[4400];
  std::snprintf(command, sizeof command, "addr2line -Cfipse '%s' %#lx 2>/dev/null", found.dli_fname,
                static_cast<unsigned long>(at));
  std::string line;
  if (std::FILE* const pipe = ::popen(command, "r")) {
    char part[512];
    while (std::fgets(part, sizeof part, pipe) != nullptr)
      if (line.empty()) line = part;
    ::pclose(pipe);
  }
  while (!line.empty() && line.back() == '\n')
    line.pop_back();
  return line.empty() || line[0] == '?' ? text : line;
}

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
  return lock_as(path, false, out, holder);
}

Status VolatileFiles::lock_shared(const std::string& path, std::unique_ptr<FileLock>* out,
                                  std::string* holder) noexcept {
  return lock_as(path, true, out, holder);
}

Status VolatileFiles::lock_as(const std::string& path, bool shared, std::unique_ptr<FileLock>* out,
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
  if (inode.locks > 0 && !(shared && inode.shared_locks)) {
    *holder = inode.note;
    return Status(StatusCode::kBusy, "locked");
  }
  ++inode.locks;
  inode.shared_locks = shared;
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
