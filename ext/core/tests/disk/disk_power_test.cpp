// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The disk log when the power goes, or its process dies, at any step.
#include <memory>

#include "disk/log.h"
#include "support/amount.h"
#include "support/check.h"
#include "support/power_loss.h"
#include "support/records.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

std::unique_ptr<Connector> make_log(FileLayer& files, unsigned segments) {
  DiskOptions options;
  options.folder = std::string(kPowerLossFolder) + "/log";
  options.segment_bytes = 32 * 1024;
  options.capacity_bytes = segments * options.segment_bytes;
  options.reinsert_percent = 50;
  options.own_threads = false;
  return std::make_unique<DiskLog>(options, files);
}

// Few and small segments, so that they retire all the time.
std::unique_ptr<Connector> make_small_log(FileLayer& files) {
  return make_log(files, 8);
}

// Nothing is evicted: a record that is, and is put again by another thread, may be another version.
std::unique_ptr<Connector> make_large_log(FileLayer& files) {
  return make_log(files, 1000);
}

// Each time that it has grown it is opened with a smaller capacity, so that segments' files go.
std::unique_ptr<Connector> make_shrinking_log(FileLayer& files) {
  std::vector<FolderEntry> entries;
  (void)files.list(std::string(kPowerLossFolder) + "/log", &entries);
  return make_log(files, entries.size() > 4 ? 2 : 8);
}

TEST(what_was_acknowledged_survives_at_every_step) {
  PowerLossOptions options;
  options.batches = 16;
  check_power_loss(make_small_log, options);
}

TEST(what_stays_within_a_smaller_capacity_survives_at_every_step) {
  PowerLossOptions options;
  options.batches = 16;
  options.first_seed = 10;
  check_power_loss(make_shrinking_log, options);
}

TEST(no_sync_can_be_left_out_where_the_capacity_gets_smaller) {
  PowerLossOptions options;
  options.batches = 16;
  options.sync_depth = 2;
  options.sync_stories = 400;
  check_every_sync_matters(make_shrinking_log, options);
}

// Where the file system cannot reserve space, a frame may find none. Then the log waits for space.
TEST(what_was_acknowledged_survives_on_a_medium_that_gets_full_and_cannot_reserve) {
  PowerLossOptions options;
  options.batches = 16;
  options.first_seed = 20;
  options.whole_seeds = 1;
  options.random_stories = 60;
  options.files.total_bytes = 160 * 1024;
  options.files.reserves = false;
  options.may_fail = true;
  options.clears = false;
  check_power_loss(make_small_log, options);
}

TEST(what_several_threads_were_told_survives) {
  PowerLossOptions options;
  options.batches = 12;
  options.threads = 3;
  options.whole_seeds = 0;
  check_power_loss(make_large_log, options);
}

std::unique_ptr<Connector> open_large_log(FileLayer& files) {
  std::unique_ptr<Connector> log = make_large_log(files);
  CHECK_EQ(log->open({}), std::string());
  return log;
}

// A torn frame is cut off, and the new segment that it began goes. A later frame takes its number,
// and then the power cut brings the segment back: its frame must not pass for a synced one. With
// `dies`, the process that cuts the frame off dies before it has synced that.
void check_cut_frame_stays_away(bool dies) {
  constexpr std::uint32_t kLong = 16 * 1024;  // does not fit into a segment behind a short one
  constexpr std::uint32_t kShort = 8 * 1024;
  unsigned torn = 0;
  for (std::uint64_t seed = 1; seed <= amount(100U, 200U); ++seed) {
    auto files = std::make_unique<VolatileFiles>();
    CHECK_OK(files->make_folder(kPowerLossFolder));
    files->settle();
    auto log = open_large_log(*files);
    CHECK(put_one(*log, Record(1, kShort)) == PutStatus::kStored);
    files->stop_at(files->steps() + 1, seed);  // within the frame; its segment is ready
    CHECK(put_one(*log, Record(2, kLong)) == PutStatus::kFailed);
    log.reset();

    auto after_cut = files->cut(Kept::kEverything, seed);
    if (dies) {
      after_cut->stop_at(after_cut->steps() + 4, seed);  // after two folders and the frame
      log = make_large_log(*after_cut);
      CHECK(!log->open({}).empty());
      log.reset();
      after_cut = after_cut->kill();
    }
    log = open_large_log(*after_cut);
    if (exists(*log, 2)) continue;  // all of it was written
    ++torn;
    // Write, sync, and no further: making the next segment would sync that the other one is gone.
    after_cut->stop_at(after_cut->steps() + 3, seed);
    CHECK(put_one(*log, Record(3, kShort)) == PutStatus::kStored);
    CHECK(after_cut->stopped());
    log.reset();

    const auto after_second_cut = after_cut->cut(Kept::kNothing, seed);
    log = open_large_log(*after_second_cut);
    CHECK(!exists(*log, 2));
    CHECK(exists(*log, 3));
    after_second_cut->stop();
  }
  CHECK(torn > 20);
}

TEST(a_frame_that_was_cut_off_does_not_come_back_with_its_segment) {
  check_cut_frame_stays_away(false);
}

TEST(a_frame_does_not_come_back_after_a_death_while_it_was_cut_off) {
  check_cut_frame_stays_away(true);
}

TEST(no_sync_can_be_left_out) {
  PowerLossOptions options;
  options.batches = 16;
  options.sync_depth = 2;
  check_every_sync_matters(make_small_log, options);
}

}  // namespace
