// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Loads of one prompt's records from a medium into the pool: extents for many records are reserved
// in one call, and their reservations end in one call, for any mix of chunks and slices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "pool/pool.h"

namespace kvstrata {

// The prompt. Keys are chunk-major: key number i is that of chunk i / n_slices, slice i % n_slices.
struct LoadRequest {
  const std::uint8_t* keys = nullptr;     // of all chunks; must outlive the request
  std::size_t n_keys = 0;                 // a multiple of the number of slices
  std::vector<std::uint8_t> parents;      // the keys before chunk 0, one per slice; empty: none
  std::vector<std::uint64_t> room_bytes;  // length of a record's extent, by slice; positive
  std::array<std::uint8_t, kKeyBytes> identity{};
  std::uint32_t tenant = 0;
  bool tail = false;

  std::size_t n_slices() const noexcept { return room_bytes.size(); }
};

// The first chunk that could not be reserved, and the reason.
struct LoadRefusal {
  std::uint32_t chunk = 0;
  ReserveOutcome why = ReserveOutcome::kReserved;  // kReserved: none was refused
};

// Reservations of the server for records that are loaded. Each ends in finish(), at the latest when
// the batch is destroyed.
class LoadBatch {
 public:
  static constexpr std::uint8_t kGivenBack = 255;

  LoadBatch() noexcept = default;
  LoadBatch(LoadBatch&&) = delete;
  ~LoadBatch();

  // Reserves extents for these keys, given by their numbers in ascending order, and takes a hold on
  // each. No chunk from the first refused one on is reserved in any slice. REQUIRES: the batch is
  // new, and the numbers are below `request.n_keys`.
  [[nodiscard]] Status reserve(std::shared_ptr<Pool> pool, const LoadRequest& request,
                               std::span<const std::uint32_t> numbers) noexcept;
  // Commits the items that are `loaded` if their records are the promised ones, and aborts the
  // others. `outcomes` gets a CommitOutcome for each item, or kGivenBack. REQUIRES: one byte per
  // item in both arrays.
  [[nodiscard]] Status finish(const std::uint8_t* loaded, std::uint8_t* outcomes) noexcept;

  std::vector<std::uint32_t> numbers;  // of the reserved items' keys
  std::vector<Hold> holds;             // of the reserved items; the taker of a hold drops it
  std::vector<std::uint32_t> present;  // numbers of keys that are in the pool already
  LoadRefusal refusal;

 private:
  struct Item {
    std::uint64_t ticket;
    std::uint32_t index;
  };

  // Reserves keys that follow each other in one slice.
  [[nodiscard]] Status reserve_run(const LoadRequest& request,
                                   std::span<const std::uint32_t> run) noexcept;

  std::shared_ptr<Pool> pool_;
  std::vector<Item> items_;  // those of one ticket follow each other
};

}  // namespace kvstrata
