// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The disk log after damage to its files: it costs the records that it hits, nothing that was
// deleted comes back, and what is lost is counted.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "disk/log.h"
#include "support/amount.h"
#include "support/check.h"
#include "support/disk_log_fixture.h"
#include "support/volatile_files.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// A log in memory, whose files can be read and damaged while it is closed.
struct Damaged : Disk {
  Damaged() : medium(std::make_unique<VolatileFiles>()) {
    CHECK_OK(medium->make_folder("/medium"));
    files = medium.get();
    options.folder = "/medium/log";
  }
  ~Damaged() { log.reset(); }

  // Ends the log: closes it, kills it, or cuts the power.
  void end(bool closed, bool power_cut = false, std::uint64_t seed = 0) {
    if (closed) log.reset();
    auto next = power_cut ? medium->cut(Kept::kRandom, seed) : medium->kill();
    log.reset();
    medium = std::move(next);
    files = medium.get();
  }
  std::vector<std::string> segments() {
    std::vector<FolderEntry> entries;
    CHECK_OK(medium->list(options.folder, &entries));
    std::vector<std::string> paths;
    for (const FolderEntry& entry : entries)
      if (entry.name.ends_with(".seg")) paths.push_back(options.folder + "/" + entry.name);
    std::ranges::sort(paths);
    return paths;
  }
  std::string read(const std::string& path) {
    std::unique_ptr<File> file;
    CHECK_OK(medium->open(path, FileMode::kRead, false, &file));
    std::uint64_t length = 0;
    CHECK_OK(file->length(&length));
    std::string bytes(length, '\0');
    const ReadPart part[] = {{bytes.data(), bytes.size()}};
    CHECK_OK(file->read(part, 0));
    return bytes;
  }
  void write(const std::string& path, const std::string& bytes) {
    std::unique_ptr<File> file;
    CHECK_OK(medium->open(path, FileMode::kReadWrite, false, &file));
    CHECK_OK(file->truncate(bytes.size()));
    const WritePart part[] = {{bytes.data(), bytes.size()}};
    CHECK_OK(file->write(part, 0));
    CHECK_OK(file->sync());  // no power cut mends it
  }
  void flip(const std::string& path, std::size_t at) {
    std::string bytes = read(path);
    bytes[at] ^= 1;
    write(path, bytes);
  }
  std::uint64_t told() { return count("corrupt_records") + count("unreadable_segments"); }

  std::unique_ptr<VolatileFiles> medium;
};

struct Frame {
  std::size_t begin = 0;
  FrameHeader header;
};

// The frames of an undamaged segment.
std::vector<Frame> frames_of(const std::string& bytes) {
  std::vector<Frame> frames;
  if (bytes.size() < kSegmentHeaderBytes) return frames;
  FileBlock block;
  SegmentHeader segment;
  std::memcpy(block.bytes.data(), bytes.data(), kFileBlockBytes);
  if (decode(block, &segment) != BlockState::kGood) return frames;
  FrameName last;
  for (std::size_t at = kSegmentHeaderBytes; at + kFrameHeaderBytes <= bytes.size();) {
    std::memcpy(block.bytes.data(), bytes.data() + at, kFileBlockBytes);
    auto header = decode_frame(block);
    if (!header.has_value() || header->generation != segment.generation || header->previous != last)
      break;
    last = header->name;
    frames.push_back({at, std::move(*header)});
    at += frames.back().header.frame_bytes();
  }
  return frames;
}

TEST(a_damaged_header_costs_no_record_unless_its_segment_is_the_oldest) {
  for (const std::size_t at : {3, 8, 20, 45}) {
    Damaged disk;
    disk.open();
    disk.put(1, 40);
    disk.remove({2, 3});
    disk.end(true);
    const auto paths = disk.segments();
    const std::string newest = paths[frames_of(disk.read(paths.back())).empty() ? 3 : 4];
    CHECK(!frames_of(disk.read(newest)).empty());
    disk.flip(newest, at);
    disk.open();
    for (int key = 1; key < 40; ++key)
      CHECK(disk.load(key) == (key == 2 || key == 3 ? LoadStatus::kAbsent : LoadStatus::kLoaded));
    disk.put(50, 60);
    disk.end(true);
    CHECK(!frames_of(disk.read(newest)).empty());  // the header was written anew
    disk.flip(paths.front(), at);
    disk.open();
    CHECK_EQ(disk.told(), 1u);
    CHECK(!disk.present(1) && !disk.present(2) && disk.present(39) && disk.present(59));
  }
}

// Otherwise the next open, which no longer finds those frames, would find records that this one did
// not.
TEST(frames_that_do_not_count_do_not_say_that_a_segment_is_the_oldest) {
  Damaged disk;
  disk.open();
  int last = 0;
  do
    disk.put({++last});
  while (frames_of(disk.read(disk.segments()[1])).empty());
  disk.end(false);
  const auto paths = disk.segments();
  const auto frames = frames_of(disk.read(paths[1]));
  CHECK_EQ(frames.size(), 1u);
  disk.flip(paths[0], 20);
  disk.flip(paths[1], frames[0].begin + kFrameHeaderBytes + 10);
  for (std::size_t free = 2; free < paths.size(); ++free)
    disk.flip(paths[free], 20);  // it says that the frame was synced
  for (const bool again : {false, true}) {
    disk.open();
    for (int key = 1; key <= last; ++key)
      CHECK(disk.load(key) == (key == last ? LoadStatus::kAbsent : LoadStatus::kLoaded));
    if (!again) disk.end(true);
  }
}

// -- random places

struct Story {
  explicit Story(std::uint64_t seed) : random(seed), seed(seed) {}

  void live_on(int batches) {
    for (int batch = 0; batch < batches; ++batch) {
      std::vector<int> keys;
      for (std::uint64_t i = 0, most = 1 + random.below(8); i < most; ++i)
        keys.push_back(next++);
      if (!deleted.empty() && random.chance(20)) keys.push_back(any_of(deleted));
      for (const PutStatus status : disk.put(keys))
        CHECK(status == PutStatus::kStored);
      for (const int key : keys) {
        deleted.erase(key);
        alive.insert(key);
      }
      if (random.chance(40)) {
        std::set<int> gone;
        for (int i = 0; i < 3; ++i)
          gone.insert(any_of(alive));
        disk.remove(std::vector(gone.begin(), gone.end()));
        for (const int key : gone) {
          alive.erase(key);
          deleted.insert(key);
        }
      }
      if (random.chance(15)) disk.reopen();
    }
  }

  void damage() {
    const auto paths = disk.segments();
    const std::string path = paths[random.below(paths.size())];
    std::string bytes = disk.read(path);
    // (Behind a damaged header, frames_of() finds nothing.)
    if (bytes.size() < kSegmentHeaderBytes || !damaged.insert(path).second) return;
    const auto frames = frames_of(bytes);
    std::size_t begin = random.below(bytes.size());
    // Half of the places are headers, or the table.
    if (random.chance(20)) begin = random.below(48);
    if (random.chance(10)) begin = bytes.size() - 1 - random.below(4096);
    if (!frames.empty() && random.chance(40))
      begin = frames[random.below(frames.size())].begin + random.below(160);
    std::size_t end = begin + 1;
    const std::uint64_t kind = random.below(4);
    if (kind < 2) {
      bytes[begin] ^= static_cast<char>(1 << random.below(8));
    } else if (kind == 2) {
      if (random.chance(30)) begin = bytes.size() - 1;
      end = bytes.size();
      bytes.resize(begin);
    } else {
      end = std::min(bytes.size(), begin + 1 + random.below(60'000));
      std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                bytes.begin() + static_cast<std::ptrdiff_t>(end), '\0');
    }
    disk.write(path, bytes);
    // A segment without its header may be left alone as a whole.
    for (const Frame& frame : frames) {
      const std::size_t frame_end = frame.begin + frame.header.frame_bytes();
      if (begin >= 48 && (frame_end <= begin || end <= frame.begin)) continue;
      hit.insert(number_of(frame.header.key));
      for (const Digest& key : frame.header.tombstones)
        hit.insert(number_of(key));
    }
  }

  void check() {
    bool lost = false;
    for (int key = 1; key < next; ++key) {
      const LoadStatus status = disk.load(key);  // verifies its bytes
      CHECK(status != LoadStatus::kFailed);
      const bool loaded = status == LoadStatus::kLoaded;
      if (!hit.contains(key) && loaded != alive.contains(key))
        fail(__FILE__, __LINE__,
             "seed " + std::to_string(seed) + ": key " + std::to_string(key) +
                 (loaded ? " was deleted and came back" : " was acknowledged and is lost"));
      lost = lost || (!loaded && alive.contains(key));
      (loaded ? deleted : alive).erase(key);
      (loaded ? alive : deleted).insert(key);
    }
    untold += lost && disk.told() == 0;
  }

  int any_of(const std::set<int>& keys) {
    return *std::next(keys.begin(), static_cast<std::ptrdiff_t>(random.below(keys.size())));
  }

  Random random;
  std::uint64_t seed;
  Damaged disk;
  int next = 1;
  std::set<int> alive;
  std::set<int> deleted;
  // Keys of damaged frames: their table may have hidden the damage, and may be lost later.
  std::set<int> hit;
  std::set<std::string> damaged;
  unsigned untold = 0;
};

TEST(damage_in_random_places_costs_only_what_it_hits) {
  unsigned untold = 0;
  const auto stories = amount<std::uint64_t>(60, 3000);
  for (std::uint64_t seed = 1; seed <= stories; ++seed) {
    Story story(seed);
    story.disk.open();
    for (int round = 0; round < 2; ++round) {
      story.live_on(8);
      const bool closed = story.random.chance(50);
      story.disk.end(closed, story.random.chance(30), seed);
      story.damage();
      story.disk.open();
      story.check();
    }
    story.live_on(3);
    story.disk.reopen();
    story.check();
    untold += story.untold;
  }
  // Only the loss of a killed log's last frames cannot be known.
  CHECK(untold <= stories / 10);
}

}  // namespace
