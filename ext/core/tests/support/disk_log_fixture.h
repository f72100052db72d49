// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A disk log in a folder that goes with the test.
#pragma once

#include "disk/log.h"
#include "support/records.h"

namespace kvstrata::testing {

struct Disk {
  Disk() {
    options.folder = root / "deep/log";
    options.capacity_bytes = 16 * 128 * 1024;
    options.own_threads = false;
  }

  std::string try_open() {
    log.reset();
    log = std::make_unique<DiskLog>(options, *files);
    return log->open({.instance_id = "first"});
  }
  void open() { CHECK_EQ(try_open(), std::string()); }
  void reopen() { open(); }

  std::vector<PutStatus> put(const std::vector<int>& numbers, int parent = 0) {
    const std::vector<Record> records = records_of(numbers, parent);
    std::vector<PutItem> items = put_items(records);
    log->put(items);
    log->put_end(items);
    std::vector<PutStatus> statuses;
    for (const PutItem& item : items)
      statuses.push_back(item.status);
    return statuses;
  }
  void put(int begin, int end) {
    std::vector<int> numbers;
    for (int number = begin; number < end; ++number)
      numbers.push_back(number);
    for (const PutStatus status : put(numbers))
      CHECK(status == PutStatus::kStored);
  }
  bool present(int number) { return exists(*log, number); }
  LoadStatus load(int number, std::uint32_t length = kLength) {
    return load_one(*log, number, nullptr, length);
  }
  void remove(const std::vector<int>& numbers) {
    std::vector<DeleteItem> items;
    for (const int number : numbers)
      items.push_back({.key = numbered_key(number)});
    log->remove(items);
    for (const DeleteItem& item : items)
      CHECK(item.removed);
  }

  std::uint64_t count(const char* name) {
    std::vector<ConnectorCount> counts;
    log->counts(&counts);
    for (const ConnectorCount& count : counts)
      if (std::string(count.name) == name) return count.value;
    return ~std::uint64_t{0};
  }

  std::uint64_t bytes_on_medium() {
    std::vector<FolderEntry> entries;
    CHECK_OK(posix_files().list(options.folder, &entries));
    std::uint64_t bytes = 0;
    for (const FolderEntry& entry : entries) {
      FileStat found;
      CHECK_OK(posix_files().stat(options.folder + "/" + entry.name, &found));
      if (entry.name != ".kvstrata.lock") bytes += found.length;
    }
    return bytes;
  }

  TestFolder root;
  DiskOptions options;
  FileLayer* files = &posix_files();
  std::unique_ptr<DiskLog> log;
};

}  // namespace kvstrata::testing
