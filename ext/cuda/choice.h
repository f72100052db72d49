// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Chooses the way (mover.h) that a copy engine takes: at first by its options and its device, later
// by a measurement. These functions decide or measure; they do not change a copy engine.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "mover.h"

namespace kvstrata::cuda {

struct EngineOptions {
  bool choose = true;    // the way is chosen: first by first_choice(), later by best_choice()
  Way way = Way::kDma;   // if not `choose`, the way to take
  int threads = 8;       // threads that compute checksums
  unsigned max_sms = 4;  // most thread blocks of a kernel; each runs on one multiprocessor
  std::uint64_t staging_bytes = 64 << 20;  // for each direction
  std::size_t queue = 256;                 // jobs
  bool rounds = false;  // takes plans with a rounding; then never by dma, and always with staging
};

struct Choice {
  Way way = Way::kDma;
  std::string reason;
  double gb_per_s[3] = {0, 0, 0};  // measured, by Way; 0: not measured
};

// The choice before a measurement. Fails if the options ask for a rounding that the device or the
// configured way cannot do.
Failure first_choice(const Device& device, const EngineOptions& options, Choice* out);

struct Measured {
  double gb_per_s[3] = {0, 0, 0};  // by Way; 0: not measured
  std::string why_not[3];          // by Way; "" for a way that was measured
};
// Measures the speed of copies of records with these blocks, both directions one after the other,
// for each way that works here. Uses device memory of its own, and [host, host + host_bytes), or
// host memory of its own if host_bytes is 0; the plan's blocks are not touched. Blocks the calling
// thread for some 50 ms. A failure's text says why nothing was measured.
Failure measure(const std::shared_ptr<Device>& device, const CopyPlan& plan,
                std::span<const std::uint32_t> blocks, std::uint64_t host, std::uint64_t host_bytes,
                const PinnedMemory& pinned, const EngineOptions& options, Measured* out);

// The fastest way that was measured, or dma if it is nearly as fast. Fails if `rounds` is true and
// no way that can round was measured.
Failure best_choice(const Measured& measured, bool rounds, Choice* out);

// Replaces the choice of staged, whose buffers could not be allocated for the reason `why`.
void choose_without_staging(const std::string& why, Choice* choice);

}  // namespace kvstrata::cuda
