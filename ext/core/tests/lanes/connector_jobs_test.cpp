// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "lanes/connector_jobs.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "hash/crc32c.h"
#include "record/record.h"
#include "support/check.h"

using namespace kvstrata;

namespace {

constexpr std::uint32_t kPayload = 100;

Digest key_of(int number) {
  Digest key{};
  key[0] = static_cast<unsigned char>(number);
  return key;
}

// Memory that records may lie in: page aligned.
struct Extent {
  explicit Extent(int number) : length(record_header_bytes(1) + kPayload), memory(length + 8192) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    bytes = memory.data() + ((4096 - address % 4096) % 4096);
    if (number < 0) return;
    RecordSpec spec;
    spec.key = key_of(number);
    std::fill(bytes + record_header_bytes(1), bytes + length, static_cast<std::uint8_t>(number));
    const std::uint32_t lengths[] = {kPayload};
    CHECK_OK(seal_record(bytes, length, spec, lengths, 1));
  }
  std::uint32_t length;
  std::vector<std::uint8_t> memory;
  std::uint8_t* bytes;
};

// Tells when the last copy of a hold is gone.
BytesHold counted(std::atomic<int>* dropped) {
  return BytesHold(dropped, [](void* counter) { *static_cast<std::atomic<int>*>(counter) += 1; });
}

class Memory final : public Connector {
 public:
  ConnectorCapabilities capabilities() const noexcept override { return {}; }
  std::string open(const ConnectorContext&) override { return ""; }
  void exists(std::span<ExistsItem>) noexcept override {}
  void put(std::span<PutItem> piece) noexcept override {
    const std::lock_guard lock(mutex);
    pieces += 1;
    for (PutItem& item : piece) {
      records[item.key].assign(item.bytes, item.bytes + item.length);
      item.status = PutStatus::kStored;
      item.reason = "";
    }
  }
  void put_end(std::span<PutItem> batch) noexcept override {
    ended_after_pieces = pieces;
    ended_items = batch.size();
  }
  void load(std::span<LoadItem> piece) noexcept override {
    for (LoadItem& item : piece) {
      const auto found = records.find(item.key);
      if (found == records.end()) {
        item.status = LoadStatus::kAbsent;
        item.reason = "";
        continue;
      }
      std::copy(found->second.begin(), found->second.end(), item.bytes);
      item.length = static_cast<std::uint32_t>(found->second.size());
      item.status = LoadStatus::kLoaded;
      item.reason = "";
      if (drops_early) item.hold.reset();
    }
  }
  void remove(std::span<DeleteItem> items) noexcept override {
    for (DeleteItem& item : items)
      item.removed = records.erase(item.key) != 0;
  }
  ConnectorUsage usage() noexcept override { return {}; }
  void take_evicted(std::vector<Digest>* keys) noexcept override { keys->push_back(key_of(77)); }
  void close() noexcept override {}

  std::mutex mutex;
  std::map<Digest, std::vector<std::uint8_t>> records;
  int pieces = 0;
  int ended_after_pieces = 0;
  std::size_t ended_items = 0;
  bool drops_early = false;
};

void run_all(LaneJob& job) {
  for (std::size_t i = 0; i < job.pieces(); ++i)
    job.run(i);
  job.end();
}

}  // namespace

TEST(a_put_runs_in_pieces_and_is_ended_once_with_the_whole_batch) {
  auto memory = std::make_shared<Memory>();
  std::atomic<int> dropped{0};
  std::vector<Extent> extents;
  std::vector<PutItem> items(5);
  for (int i = 0; i < 5; ++i) {
    extents.emplace_back(i);
    items[i].key = key_of(i);
    items[i].bytes = extents[i].bytes;
    items[i].length = extents[i].length;
    items[i].hold = counted(&dropped);
  }
  PutJob job(memory, std::move(items), 2);
  CHECK_EQ(job.pieces(), 3U);
  run_all(job);
  CHECK_EQ(memory->ended_after_pieces, 3);
  CHECK_EQ(memory->ended_items, 5U);
  CHECK_EQ(dropped.load(), 5);
  CHECK_EQ(job.evicted.size(), 1U);
  for (const PutItem& item : job.items)
    CHECK(item.status == PutStatus::kStored);
}

TEST(what_was_loaded_is_checked_and_a_bad_record_leaves_the_medium) {
  auto memory = std::make_shared<Memory>();
  for (int i = 0; i < 3; ++i) {
    const Extent extent(i);
    memory->records[key_of(i)].assign(extent.bytes, extent.bytes + extent.length);
  }
  memory->records[key_of(1)].back() ^= 1;
  for (const bool early : {false, true}) {
    memory->drops_early = early;
    std::atomic<int> dropped{0};
    std::vector<Extent> extents;
    std::vector<LoadItem> items(4);
    for (int i = 0; i < 4; ++i) {
      extents.emplace_back(-1);
      items[i].key = key_of(i);
      items[i].bytes = extents[i].bytes;
      items[i].length = extents[i].length;
      items[i].hold = counted(&dropped);
    }
    LoadJob job(memory, std::move(items), 4);
    run_all(job);
    CHECK(job.items[0].status == LoadStatus::kLoaded);
    CHECK(job.items[1].status == (early ? LoadStatus::kAbsent : LoadStatus::kCorrupt));
    CHECK(job.items[2].status == LoadStatus::kLoaded);
    CHECK(job.items[3].status == LoadStatus::kAbsent);
    CHECK(!memory->records.contains(key_of(1)));
    CHECK_EQ(dropped.load(), 4);
  }
}

TEST(an_encoded_record_is_checked_as_stored_and_one_of_another_version_is_left_alone) {
  auto memory = std::make_shared<Memory>();
  const Extent plain(5);
  std::uint8_t* const payload = plain.bytes + record_header_bytes(1);
  RecordHeader header;
  Section section;
  CHECK_OK(read_record_header(plain.bytes, plain.length, &header, &section, 1));
  RecordEncoding encoding;
  encoding.codecs[0] = 77;
  encoding.stored_bytes = kPayload - 7;
  encoding.stored_crc = crc32c(payload, kPayload - 7);
  CHECK_OK(write_encoded_header(plain.bytes, plain.length, header.spec, &section, 1, encoding));
  std::vector<std::uint8_t> stored(plain.bytes, plain.bytes + plain.length - 7);
  const auto load = [&] {
    memory->records[key_of(5)] = stored;
    const Extent extent(-1);
    std::vector<LoadItem> items(1);
    items[0].key = key_of(5);
    items[0].bytes = extent.bytes;
    items[0].length = plain.length;  // more room than the encoded record needs
    LoadJob job(memory, std::move(items), 1);
    run_all(job);
    return job.items[0].status;
  };
  CHECK(load() == LoadStatus::kLoaded);
  const auto set_version = [&](std::uint8_t version) {
    stored[8] = version;
    const std::uint32_t crc = crc32c(stored.data(), kOuterHeaderBytes - sizeof(crc));
    std::memcpy(stored.data() + kOuterHeaderBytes - sizeof(crc), &crc, sizeof(crc));
  };
  set_version(2);
  CHECK(load() == LoadStatus::kFailed);
  CHECK(memory->records.contains(key_of(5)));
  stored[8] ^= 1;  // damage, not another version
  CHECK(load() == LoadStatus::kCorrupt);
  CHECK(memory->records.empty());
  set_version(1);
  CHECK(load() == LoadStatus::kLoaded);
  stored.back() ^= 1;
  CHECK(load() == LoadStatus::kCorrupt);
  CHECK(memory->records.empty());
}
