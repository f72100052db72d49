// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// `fs` through power cuts and deaths at every step of the file layer (power_loss.h).
#include "fs/connector.h"
#include "support/power_loss.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

std::unique_ptr<Connector> make_fs(FileLayer& files, std::uint64_t capacity_bytes,
                                   bool own_threads) {
  FsOptions options;
  options.base_path = std::string(kPowerLossFolder) + "/fs";
  options.capacity_bytes = capacity_bytes;
  options.min_free_bytes = 0;
  options.own_threads = own_threads;
  return std::make_unique<FsConnector>(options, files);
}

std::unique_ptr<Connector> make_open_fs(FileLayer& files) {
  return make_fs(files, 0, false);
}

// Holds about half of the keys.
std::unique_ptr<Connector> make_capped_fs(FileLayer& files) {
  return make_fs(files, 50'000, false);
}

std::unique_ptr<Connector> make_threaded_fs(FileLayer& files) {
  return make_fs(files, 0, true);
}

}  // namespace

TEST(what_was_acknowledged_survives_at_every_step) {
  check_power_loss(make_open_fs);
}

TEST(what_was_acknowledged_survives_until_the_cap_evicts_it) {
  check_power_loss(make_capped_fs);
}

TEST(what_several_threads_were_told_survives) {
  PowerLossOptions options;
  options.threads = 3;
  options.whole_seeds = 0;
  check_power_loss(make_threaded_fs, options);
}

TEST(no_sync_can_be_left_out) {
  PowerLossOptions options;
  options.sync_depth = 7;
  check_every_sync_matters(make_capped_fs, options);
}
