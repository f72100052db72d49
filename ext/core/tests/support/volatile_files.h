// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// VolatileFiles: a file layer in memory whose cache is lost at a power cut, to test what survives.
//
// It keeps what files.h promises and, chosen by a seed, nothing beyond it:
//   1. A file has durable bytes and the list of what was done to it since (writes, allocations,
//      truncations). A cut keeps any subset of the list; of a write any subset of the pieces that
//      blocks of 512 bytes cut it into; of a write over several blocks the new length by itself.
//   2. A folder has durable names and, for each name, the list of what it stood for since. A cut
//      keeps any beginning of each list, names independent of each other, but that a name which
//      was renamed away only goes where the new name is there. Both may be.
//   3. sync() empties the list of 1, sync_folder() those of 2. After lose_unsynced() what stood in
//      the list stays there for good.
//   4. kill(): the process is gone, with its open files and locks; nothing else changes, and what
//      was not synced is not synced.
//   5. Access times are lost, locks too.
//
// Steps. Each call that changes something or syncs is one; calls that only read, that fail because
// of their arguments, or set an access time are none. stop_at(n): step n may happen, or partly, and
// answers EIO; from then on every call does, and nothing changes any more. cut() and kill() stop
// too and return the files as the next process finds them; files and locks of the stopped ones stay
// usable and answer EIO, so that whoever held them can be destroyed.
//
// Syncs are known by where they are called (SyncSites), and each of those places can be made to do
// nothing. This needs a call that is no tail call: -O1, or -fno-optimize-sibling-calls.
//
// Thread-safe. Memory: a block that was written and not changed since is shared with copies.
#pragma once

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "files/files.h"
#include "support/hooked_files.h"

namespace kvstrata::testing {

// The same numbers for a seed everywhere (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  // REQUIRES: limit > 0.
  std::uint64_t below(std::uint64_t limit) { return next() % limit; }
  bool chance(unsigned percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

// What a power cut keeps of what was not synced.
enum class Kept : std::uint8_t {
  kNothing,
  kEverything,
  kData,             // no names
  kNames,            // no data, no lengths
  kNamesAndLengths,  // files are as long as they were and read as zeros
  kRandom,           // by the seed; between all of these, another one for each file
};
inline constexpr std::array kAllKept = {Kept::kNothing, Kept::kEverything,      Kept::kData,
                                        Kept::kNames,   Kept::kNamesAndLengths, Kept::kRandom};

inline const char* kept_name(Kept kept) {
  constexpr std::array names = {"nothing", "everything",        "data",
                                "names",   "names_and_lengths", "random"};
  return names[static_cast<std::size_t>(kept)];
}

// The places that call sync() and sync_folder(): an address each, or the addresses of `depth`
// callers. Shared by all copies of the files that use it. Thread-safe.
class SyncSites {
 public:
  explicit SyncSites(std::size_t depth = 1) : depth_(depth) {}

  // Callers of the caller do not tell places apart, in this thread.
  static void begin_here();

  // In the order in which they were first reached.
  std::size_t count();
  // The `index`-th does nothing from now on, all others do what they should; none: all do.
  void forget(std::optional<std::size_t> index);

  // Function, file and line, of the innermost caller first.
  std::string describe(std::size_t index);

  // A call came from `caller`. Whether it is to do something.
  bool reached(void* caller);

 private:
  void add_callers(std::vector<void*>* site) const;

  static std::string describe_address(void* address);

  inline static thread_local int outer_frames_ = 0;

  const std::size_t depth_;
  std::mutex mutex_;
  std::vector<std::vector<void*>> sites_;
  std::optional<std::size_t> forgotten_;
};

struct VolatileOptions {
  std::uint64_t total_bytes = std::uint64_t{1} << 40;
  bool direct = true;    // false: open(direct) is kUnsupported
  bool reserves = true;  // false: allocate() only makes a file longer
  bool traces = false;   // keep a line for each step
};

class VolatileFiles final : public FileLayer {
 public:
  // Holds nothing but the folder "/".
  explicit VolatileFiles(VolatileOptions options = {},
                         std::shared_ptr<SyncSites> sites = std::make_shared<SyncSites>());

  // Step `step`, counted from 1 and from the making of these files, is the last one, and the first
  // that fails. `seed` says how much of it happens.
  void stop_at(std::uint64_t step, std::uint64_t seed);
  void stop();
  // All that is there is durable from here on. No step.
  void settle();
  [[nodiscard]] bool stopped() const;
  [[nodiscard]] std::uint64_t steps() const;
  // The lines of those before, too.
  [[nodiscard]] std::vector<std::string> trace() const;
  [[nodiscard]] SyncSites& sync_sites() const;

  // Stops, and returns what is there when the power is back. May be asked again, for other ends of
  // the same story.
  std::unique_ptr<VolatileFiles> cut(Kept kept, std::uint64_t seed);

  // Stops, and returns what the next process finds. As cut(), it may be asked again.
  std::unique_ptr<VolatileFiles> kill() { return copy("killed"); }

  Status open(const std::string& path, FileMode mode, bool direct,
              std::unique_ptr<File>* out) noexcept override;
  Status rename(const std::string& from, const std::string& to) noexcept override;
  Status unlink(const std::string& path) noexcept override;
  Status make_folder(const std::string& path) noexcept override;
  [[gnu::noinline]] Status sync_folder(const std::string& path) noexcept override;
  Status stat(const std::string& path, FileStat* out) noexcept override;
  Status list(const std::string& path, std::vector<FolderEntry>* out) noexcept override;
  Status space(const std::string& path, FileSpace* out) noexcept override;
  Status lock(const std::string& path, std::unique_ptr<FileLock>* out,
              std::string* holder) noexcept override;

 private:
  struct Machine;
  class VolatileFile;
  class VolatileLock;

  explicit VolatileFiles(std::shared_ptr<Machine> machine) : machine_(std::move(machine)) {}

  // Stops, and copies without open files and locks.
  std::unique_ptr<VolatileFiles> copy(const std::string& why);

  const std::shared_ptr<Machine> machine_;
};

}  // namespace kvstrata::testing
