// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What the tests of connectors share: a folder, sealed records by number, and batches as a lane
// runs them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvstrata/connector.h"
#include "record/record.h"
#include "support/check.h"

namespace kvstrata::testing {

// A folder that goes with the test.
struct TestFolder {
  TestFolder() {
    std::string pattern =
        std::string(std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") + "/kvstrata-XXXXXX";
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    path = pattern;
  }
  ~TestFolder() { std::filesystem::remove_all(path); }
  std::string operator/(const char* name) const { return path + "/" + name; }
  std::string path;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

inline Digest numbered_key(int number) {
  Digest key{};
  std::memcpy(key.data(), &number, sizeof(number));
  key[31] = 1;
  return key;
}

inline int number_of(const Digest& key) {
  int number = 0;
  std::memcpy(&number, key.data(), sizeof(number));
  return number;
}

inline const auto kHeaderBytes = static_cast<std::uint32_t>(record_header_bytes(1));
inline const std::uint32_t kLength = kHeaderBytes + 3000;

// The record of this number, or, for -1, room for one.
class Record {
 public:
  explicit Record(int number, std::uint64_t length_bytes = kLength, int parent = 0)
      : key(numbered_key(number)),
        length(static_cast<std::uint32_t>(length_bytes)),
        memory_(std::aligned_alloc(4096, (length + 4095) / 4096 * 4096), std::free) {
    bytes = static_cast<std::uint8_t*>(memory_.get());
    if (number < 0) return;
    RecordSpec spec{.key = key};
    if (parent != 0) spec.parent_key = numbered_key(parent);
    for (std::uint32_t i = kHeaderBytes; i < length; ++i)
      bytes[i] = static_cast<std::uint8_t>(number * 31 + i * 7 + i / 251);
    const std::uint32_t lengths[] = {length - kHeaderBytes};
    CHECK_OK(seal_record(bytes, length, spec, lengths, 1));
  }
  Digest key;
  std::uint32_t length;
  std::uint8_t* bytes;

 private:
  std::shared_ptr<void> memory_;
};

inline std::vector<Record> records_of(const std::vector<int>& numbers, int parent = 0) {
  std::vector<Record> records;
  for (const int number : numbers)
    records.emplace_back(number, kLength, parent);
  return records;
}

inline PutItem put_item(const Record& record) {
  return {.key = record.key, .bytes = record.bytes, .length = record.length, .hold = {}};
}

inline std::vector<PutItem> put_items(const std::vector<Record>& records) {
  std::vector<PutItem> items;
  for (const Record& record : records)
    items.push_back(put_item(record));
  return items;
}

inline std::vector<PutItem> put_all(Connector& connector, const std::vector<Record>& records) {
  std::vector<PutItem> items = put_items(records);
  for (PutItem& item : items)
    connector.put(std::span(&item, 1));
  connector.put_end(items);
  return items;
}

inline PutStatus put_one(Connector& connector, const Record& record) {
  return put_all(connector, {record})[0].status;
}

inline bool stored(Connector& connector, const std::vector<int>& numbers) {
  return std::ranges::all_of(put_all(connector, records_of(numbers)),
                             [](const PutItem& item) { return item.status == PutStatus::kStored; });
}

inline LoadItem load_item(int number, const Record& room) {
  return {.key = numbered_key(number), .bytes = room.bytes, .length = room.length, .hold = {}};
}

// As a lane does: loads and verifies, and has a corrupt copy removed.
inline LoadStatus load_one(Connector& connector, int number, std::string* reason = nullptr,
                           std::uint32_t length = kLength) {
  const Record room(-1, length);
  LoadItem item = load_item(number, room);
  connector.load(std::span(&item, 1));
  if (item.status == LoadStatus::kLoaded && !verify_record(room.bytes, length, &item.key).ok())
    item.status = LoadStatus::kCorrupt;
  if (item.status == LoadStatus::kCorrupt) connector.remove_corrupt(item);
  if (reason != nullptr) *reason = item.reason;
  return item.status;
}

inline bool exists(Connector& connector, int number) {
  ExistsItem item{.key = numbered_key(number)};
  connector.exists(std::span(&item, 1));
  return item.presence == Presence::kPresent;
}

inline bool removed(Connector& connector, int number) {
  DeleteItem item{.key = numbered_key(number)};
  connector.remove(std::span(&item, 1));
  return item.removed;
}

}  // namespace kvstrata::testing
