// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A pool in files of its own, and the calls that most tests make: chains of keys, sound records,
// stores and leases.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "pool/pool.h"
#include "record/record.h"
#include "support/check.h"
#include "support/keys.h"
#include "support/pool_validation.h"

namespace kvstrata::testing {

inline constexpr std::uint64_t kRecordBytes = 8192;
inline constexpr std::uint32_t kPayloadBytes = 4096;

inline const Key kIdentity = make_key(0xFFFF);

inline std::vector<std::uint8_t> packed(const std::vector<Key>& keys) {
  std::vector<std::uint8_t> bytes(keys.size() * kKeyBytes);
  for (std::size_t i = 0; i < keys.size(); ++i)
    keys[i].store(bytes.data() + i * kKeyBytes);
  return bytes;
}

inline std::vector<Key> chain(std::uint64_t prompt, std::uint64_t chunks) {
  std::vector<Key> keys;
  for (std::uint64_t i = 0; i < chunks; ++i)
    keys.push_back(make_key(prompt * 1000 + i));
  return keys;
}

// CHECK_EQ keeps references, which a member of a temporary does not survive.
inline std::uint64_t copy(std::uint64_t value) {
  return value;
}
inline std::uint8_t first(const std::vector<std::uint8_t>& outcomes) {
  return outcomes[0];
}

struct Files {
  int index = memfd_create("index", MFD_CLOEXEC);
  int extents = memfd_create("extents", MFD_CLOEXEC);
  ~Files() {
    close(index);
    close(extents);
  }
};

struct Fixture {
  Files files;
  PoolOptions options;
  std::shared_ptr<Pool> pool;

  explicit Fixture(std::uint64_t extents = 64, const char* policy = "VALUE",
                   std::uint64_t entries = 256) {
    options.extents_bytes = extents * kRecordBytes;
    options.entry_capacity = entries;
    options.policy = policy;
    CHECK_OK(Pool::create(files.index, files.extents, options, &pool));
  }
  std::uint32_t row(std::uint8_t name, bool registers_memory = false) {
    std::uint8_t id[16] = {name};
    std::uint32_t result = 0;
    CHECK_OK(pool->claim_row(id, id, 1000 + name, registers_memory, &result));
    return result;
  }
  ReserveResult reserve(const std::vector<Key>& keys, std::uint32_t row = 0,
                        const Key* parent = nullptr, std::uint64_t bytes = kRecordBytes,
                        std::uint32_t tenant = 0, const Key& of = kIdentity) {
    const auto raw = packed(keys);
    std::uint8_t identity[32];
    std::uint8_t parent_bytes[32];
    of.store(identity);
    if (parent != nullptr) parent->store(parent_bytes);
    ReserveRequest request;
    request.keys = raw.data();
    request.n_keys = keys.size();
    request.parent = parent == nullptr ? nullptr : parent_bytes;
    request.record_bytes = bytes;
    request.row = row;
    request.identity = identity;
    request.tenant = tenant;
    ReserveResult result;
    CHECK_OK(pool->reserve(request, &result));
    return result;
  }
  // Writes a sound record of `key` into the extent.
  void write(const ExtentRecord& extent, const Key& key, std::uint8_t fill = 7,
             const Key& of = kIdentity) {
    std::uint8_t* record = pool->extents_address() + extent.offset;
    const std::uint32_t payload = extent.length - 4096;
    std::memset(record + 4096, fill, payload);
    RecordSpec spec;
    key.store(spec.key.data());
    of.store(spec.identity.data());
    spec.chunk_tokens = 256;
    CHECK_OK(seal_record(record, extent.length, spec, &payload, 1));
  }
  std::vector<std::uint8_t> commit(std::uint64_t ticket,
                                   const std::vector<std::uint32_t>& indices) {
    std::vector<std::uint8_t> outcomes(indices.size());
    CHECK_OK(pool->commit(ticket, indices, true, outcomes.data()));
    return outcomes;
  }
  std::uint8_t commit_one(std::uint64_t ticket, std::uint32_t index) {
    return commit(ticket, {index})[0];
  }
  void store(const std::vector<Key>& keys, std::uint32_t row = 0,
             std::uint64_t bytes = kRecordBytes, std::uint32_t tenant = 0) {
    const auto reserved = reserve(keys, row, nullptr, bytes, tenant);
    for (std::uint32_t i = 0; i < keys.size(); ++i) {
      if (reserved.outcomes[i] == static_cast<std::uint8_t>(ReserveOutcome::kPresent)) continue;
      CHECK_EQ(reserved.outcomes[i], ReserveOutcome::kReserved);
      write(reserved.extents[i], keys[i]);
      CHECK_EQ(commit_one(reserved.ticket, i), CommitOutcome::kCommitted);
    }
  }
  std::size_t peek(const std::vector<Key>& keys) {
    return pool->peek(packed(keys).data(), keys.size(), 1);
  }
  LeaseResult lease(const std::vector<Key>& keys, std::vector<std::uint32_t> rows,
                    const std::uint8_t* identity = nullptr, std::vector<std::uint32_t> spans = {0},
                    std::size_t own_chunks = 0, std::uint32_t tenant = 0) {
    LeaseResult result;
    CHECK_OK(pool->lease(packed(keys).data(), keys.size(), spans, rows, identity, false, &result,
                         false, own_chunks, tenant));
    return result;
  }
  void adopt() {
    pool->close();
    pool.reset();
    PoolOptions again;
    again.policy = options.policy;
    FormatMismatch mismatch;
    CHECK_OK(Pool::adopt(files.index, files.extents, again, &pool, &mismatch));
    CHECK_OK(validate(*pool));
  }
  std::uint64_t count(EntryState state) { return pool->stats().entries[static_cast<int>(state)]; }
};

}  // namespace kvstrata::testing
