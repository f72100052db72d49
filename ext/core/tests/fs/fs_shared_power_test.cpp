// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// `fs` in a shared directory through power cuts and deaths at every step of the file layer
// (power_loss.h), with one member at a time.
#include "fs/shared/connector.h"
#include "support/power_loss.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// Ten seconds pass before each put: more than a lease.
class Unhurried final : public FsSharedConnector {
 public:
  Unhurried(const FsOptions& options, FileLayer& files, std::shared_ptr<std::int64_t> now_ns)
      : FsSharedConnector(options, files, {.clock = [now_ns] { return *now_ns; }}),
        now_ns_(std::move(now_ns)) {}
  void put(std::span<PutItem> piece) noexcept override {
    *now_ns_ += 10'000'000'000;
    FsSharedConnector::put(piece);
  }

 private:
  const std::shared_ptr<std::int64_t> now_ns_;
};

std::unique_ptr<Connector> make_fs(FileLayer& files, std::uint64_t capacity_bytes) {
  FsOptions options;
  options.base_path = std::string(kPowerLossFolder) + "/fs";
  options.capacity_bytes = capacity_bytes;
  options.min_free_bytes = 0;
  options.own_threads = false;
  return std::make_unique<Unhurried>(options, files, std::make_shared<std::int64_t>(0));
}

// Others come and go: a name that was found and not put, or said to EXIST, was promised to nobody.
PowerLossOptions shared_options() {
  PowerLossOptions options;
  options.found_is_durable = false;
  return options;
}

}  // namespace

TEST(what_was_acknowledged_survives_at_every_step) {
  check_power_loss([](FileLayer& files) { return make_fs(files, 0); }, shared_options());
}

TEST(what_was_acknowledged_survives_until_the_cap_evicts_it) {
  check_power_loss([](FileLayer& files) { return make_fs(files, 100'000); }, shared_options());
}
