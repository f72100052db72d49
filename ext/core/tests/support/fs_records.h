// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What the tests of `fs` share: a folder, sealed records by number, batches as a lane runs them.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "fs/connector.h"
#include "record/record.h"
#include "support/check.h"

namespace kvstrata::testing {

struct TestFolder {
  TestFolder() {
    std::string pattern =
        std::string(std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") + "/kvstrata-fs-XXXXXX";
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    path = pattern;
  }
  ~TestFolder() { std::filesystem::remove_all(path); }
  std::string path;
};

inline Digest numbered_key(int number) {
  Digest key{};
  for (std::size_t i = 0; i < key.size(); ++i)
    key[i] = static_cast<unsigned char>(number * 37 + number / 251 * 11 + static_cast<int>(i) * 5);
  key[31] = static_cast<unsigned char>(number);
  key[30] = static_cast<unsigned char>(number >> 8);
  return key;
}

// Memory with a sealed record, or room for one.
class Record {
 public:
  Record(int number, std::uint32_t payload, bool sealed = true)
      : key(numbered_key(number)),
        length(static_cast<std::uint32_t>(record_header_bytes(1)) + payload),
        memory_(std::aligned_alloc(4096, (length + 8191) / 4096 * 4096), std::free) {
    bytes = static_cast<std::uint8_t*>(memory_.get());
    if (!sealed) return;
    std::fill(bytes + record_header_bytes(1), bytes + length, static_cast<std::uint8_t>(number));
    RecordSpec spec;
    spec.key = key;
    const std::uint32_t lengths[] = {payload};
    CHECK_OK(seal_record(bytes, length, spec, lengths, 1));
  }
  Digest key;
  std::uint32_t length;
  std::uint8_t* bytes;

 private:
  std::shared_ptr<void> memory_;
};

inline std::vector<PutItem> put_items(const std::vector<Record>& records) {
  std::vector<PutItem> items(records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    items[i].key = records[i].key;
    items[i].bytes = records[i].bytes;
    items[i].length = records[i].length;
  }
  return items;
}

inline std::vector<PutItem> put_all(Connector& connector, const std::vector<Record>& records) {
  std::vector<PutItem> items = put_items(records);
  for (PutItem& item : items)
    connector.put(std::span(&item, 1));
  connector.put_end(items);
  return items;
}

inline std::vector<Record> records_of(const std::vector<int>& numbers, std::uint32_t payload) {
  std::vector<Record> records;
  for (const int number : numbers)
    records.emplace_back(number, payload);
  return records;
}

inline bool stored(Connector& connector, const std::vector<int>& numbers, std::uint32_t payload) {
  for (const PutItem& item : put_all(connector, records_of(numbers, payload))) {
    if (item.status != PutStatus::kStored) return false;
  }
  return true;
}

// As LoadJob: loads and verifies, and has a corrupt copy removed.
inline LoadStatus load_one(Connector& connector, int number, std::uint32_t payload,
                           std::string* reason = nullptr) {
  const Record room(number, payload, false);
  LoadItem item;
  item.key = room.key;
  item.bytes = room.bytes;
  item.length = room.length;
  connector.load(std::span(&item, 1));
  if (item.status == LoadStatus::kLoaded && !verify_record(room.bytes, room.length, &room.key).ok())
    item.status = LoadStatus::kCorrupt;
  if (item.status == LoadStatus::kCorrupt) connector.remove_corrupt(item);
  if (reason != nullptr) *reason = item.reason;
  return item.status;
}

inline bool exists(Connector& connector, int number) {
  ExistsItem item;
  item.key = numbered_key(number);
  connector.exists(std::span(&item, 1));
  return item.presence == Presence::kPresent;
}

inline bool removed(Connector& connector, int number) {
  DeleteItem item{.key = numbered_key(number)};
  connector.remove(std::span(&item, 1));
  return item.removed;
}

struct OnDisk {
  std::size_t records = 0;
  std::size_t parts = 0;
  std::uint64_t charge = 0;
};

inline OnDisk on_disk(const std::string& base) {
  OnDisk found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(base)) {
    const bool is_record = entry.path().extension() == ".kvc";
    const bool is_part = entry.path().extension() == ".part";
    found.records += is_record;
    found.parts += is_part;
    if (is_record || is_part) found.charge += fs_charge(entry.file_size());
  }
  return found;
}

inline FsOptions fs_options(const std::string& base, std::uint64_t capacity_bytes = 0) {
  FsOptions options;
  options.base_path = base;
  options.capacity_bytes = capacity_bytes;
  options.min_free_bytes = 0;
  return options;
}

}  // namespace kvstrata::testing
