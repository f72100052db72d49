// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Which of the three ways (engines.h) a copy engine takes: what its options and the device say at
// the start, later what was measured. All here decide or measure; none changes an engine.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "engines.h"

namespace kvstrata::cuda {

struct EngineOptions {
  bool choose = true;  // `way` is then only where to begin
  Way way = Way::kDma;
  int threads = 2;       // that compute checksums
  unsigned max_sms = 4;  // thread blocks of a kernel, each filling a multiprocessor's share
  std::uint64_t staging_bytes = 64 << 20;  // for each direction
  std::size_t queue = 256;
  bool rounds = false;  // takes plans with a rounding: never dma, and staging is always there
};

struct Choice {
  Way way = Way::kDma;
  std::string reason;
  double gb_per_s[3] = {0, 0, 0};  // measured, by Way; 0: not tried
};

// Before anything was measured. Fails where the options ask for a rounding that the device or the
// configured way cannot do.
Failure first_choice(const Device& device, const EngineOptions& options, Choice* out);

// GB/s of copies shaped as records of so many blocks, both directions one after the other, for each
// way that works here. Works on memory of its own on the device and on the given host memory, or
// its own where host_bytes is 0; the plan's blocks are not touched. Blocks its thread for some
// 10 ms.
struct Measured {
  double gb_per_s[3] = {0, 0, 0};  // by Way; 0: was not tried
  std::string why_not[3];
};
Failure measure(const std::shared_ptr<Device>& device, const CopyPlan& plan,
                std::span<const std::uint32_t> blocks, std::uint64_t host, std::uint64_t host_bytes,
                const PinnedMemory& pinned, const EngineOptions& options, Measured* out);

// The fastest way that was measured, or dma where that is nearly as fast. Fails where `rounds` and
// nothing that rounds was measured.
Failure best_choice(const Measured& measured, bool rounds, Choice* out);

// In place of a best choice of staged, where its buffers cannot be had for the reason `why`.
void choose_without_staging(const std::string& why, Choice* choice);

}  // namespace kvstrata::cuda
