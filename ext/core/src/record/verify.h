// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Verifies many records in parallel.
#pragma once

#include <cstdint>
#include <span>

#include "base/crew.h"
#include "base/status.h"
#include "record/record.h"

namespace kvstrata {

struct StoredRecord {
  const void* bytes = nullptr;  // `length` bytes, which must outlive the call
  std::uint64_t length = 0;
  Digest key{};
  Status status;  // the result, of verify_stored_record
};

// Verifies all records, in the calling thread and in idle threads of the crew; returns when done.
void verify_each(Crew& crew, std::span<StoredRecord> records);

}  // namespace kvstrata
