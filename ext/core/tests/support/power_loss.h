// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What a durable connector keeps when the power goes, or its process dies, at any step: stories of
// several lives on VolatileFiles, and a model that knows what was promised.
//
//     TEST(what_was_acknowledged_survives) {
//       check_power_loss([](FileLayer& files) { return make_mine(files, kPowerLossFolder); });
//     }
//     TEST(no_sync_can_be_left_out) { check_every_sync_matters(the same); }
//
// A story has a seed and a step. Its seed says what is put, loaded and deleted; at the step the
// machine stops, and the story goes on once for each End. Each life after that opens, looks at all
// keys, uses the medium and ends again. A failed check says [seed/step/end]; with that in
// KVSTRATA_POWER_STORY the test program tells this one story, with all steps of the file layer:
//
//     KVSTRATA_POWER_STORY=8/7/5 build/native/tests-address/tests/mine_test what_was_acknowledged
//
// The promises:
//   1. A key that was STORED, or said to EXIST, is PRESENT and loads with its bytes, until it is
//      deleted or named by take_evicted(), of which the connector is asked after the stop too.
//   2. A deleted key (removed; or any, by a clear() that returned before the stop) is ABSENT until
//      it is put again.
//   3. What is PRESENT after opening loads, with bytes that were put under this key, whoever
//      acknowledged it; and stays PRESENT, as if acknowledged, after another stop.
//   4. What was tried and not acknowledged may be there or not. An item that was acknowledged in a
//      batch during which the machine stopped counts as acknowledged.
//   5. usage() never exceeds its capacity. open() succeeds, unless the machine stops.
//
// The folder kPowerLossFolder is there, durable and empty, at the beginning.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvstrata/connector.h"
#include "support/check.h"
#include "support/volatile_files.h"

namespace kvstrata::testing {

inline constexpr const char* kPowerLossFolder = "/medium";

using MakeConnector = std::function<std::unique_ptr<Connector>(FileLayer& files)>;

struct PowerLossOptions {
  unsigned keys = 10;
  unsigned batches = 10;  // of a life, of up to max_items
  unsigned max_items = 4;
  // A record's payload has about one of these lengths, by its key.
  std::vector<std::uint32_t> payload_bytes = {100, 3000, 9000};
  // Of the life in which the machine stops. With more than one, half of the keys are put by all
  // threads and never deleted, and the others belong to one thread each.
  unsigned threads = 1;
  VolatileOptions files = {};
  // Puts and deletes may be refused while the machine runs (a medium that gets full).
  bool may_fail = false;
  bool clears = true;  // where the connector can

  std::uint64_t first_seed = 1;
  // Everything; the gate tells about a quarter of it (support/amount.h).
  unsigned whole_seeds = 2;       // of these every step is the last one once, up to
  unsigned max_steps = 150;       // so many
  unsigned random_stories = 100;  // of other seeds, each stopped at one step
  // check_every_sync_matters: stories per place that syncs, and how many callers tell places apart.
  unsigned sync_stories = 300;
  std::size_t sync_depth = 1;
};

// How the life ends in which the machine stopped. The first ones are those of Kept.
enum class End : std::uint8_t {
  kCutNothing,
  kCutEverything,
  kCutData,
  kCutNames,
  kCutNamesAndLengths,
  kCutRandom,
  kKill,            // and more lives
  kKillCutNothing,  // the process dies, the next one opens, then the power goes
  kKillCutRandom,
  kClose,  // and more lives; as kKill if the machine stopped
};
inline constexpr unsigned kEnds = 10;
inline const char* end_name(unsigned end) {
  constexpr std::array names = {"cut:nothing", "cut:everything",        "cut:data",
                                "cut:names",   "cut:names_and_lengths", "cut:random",
                                "kill",        "kill+cut:nothing",      "kill+cut:random",
                                "close"};
  return names.at(end);
}

// Fails the test at the first broken promise.
void check_power_loss(const MakeConnector& make, PowerLossOptions options = {});

// Leaves out the syncs of each place that the stories reach, one place after the other, and fails
// the test where nothing missed them. REQUIRES: no promise is broken with all of them in place.
void check_every_sync_matters(const MakeConnector& make, const PowerLossOptions& options = {});

}  // namespace kvstrata::testing
