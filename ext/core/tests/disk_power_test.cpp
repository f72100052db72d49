// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The disk log when the power goes, or its process dies, at any step.
#include "check.h"
#include "kvstrata/disk_log.h"
#include "power_loss.h"

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

TEST(what_was_acknowledged_survives_at_every_step) {
  PowerLossOptions options;
  options.batches = 16;
  check_power_loss(make_small_log, options);
}

TEST(what_several_threads_were_told_survives) {
  PowerLossOptions options;
  options.batches = 12;
  options.threads = 3;
  options.whole_seeds = 0;
  check_power_loss(make_large_log, options);
}

TEST(no_sync_can_be_left_out) {
  PowerLossOptions options;
  options.batches = 16;
  options.sync_depth = 2;
  check_every_sync_matters(make_small_log, options);
}

}  // namespace
