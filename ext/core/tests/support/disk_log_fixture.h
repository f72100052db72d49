// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A disk log in a folder that goes with the test, and small records to put into it.
#pragma once

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "disk/log.h"
#include "record/record.h"
#include "support/check.h"

inline constexpr std::uint32_t kPayload = 3000;

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// A record of this number, or, for -1, room for one.
struct Extent {
  explicit Extent(int number, std::uint64_t length_bytes = 0, int parent = 0)
      : length(static_cast<std::uint32_t>(
            length_bytes ? length_bytes : kvstrata::record_header_bytes(1) + kPayload)),
        memory(static_cast<std::uint8_t*>(std::aligned_alloc(4096, (length + 4095) / 4096 * 4096)),
               std::free),
        bytes(memory.get()) {
    if (number < 0) return;
    kvstrata::RecordSpec spec;
    std::memcpy(spec.key.data(), &number, sizeof(number));
    spec.key[31] = 1;
    if (parent != 0) {
      std::memcpy(spec.parent_key.data(), &parent, sizeof(parent));
      spec.parent_key[31] = 1;
    }
    const auto header = static_cast<std::uint32_t>(kvstrata::record_header_bytes(1));
    for (std::uint32_t i = header; i < length; ++i)
      bytes[i] = static_cast<std::uint8_t>(number * 31 + i * 7 + i / 251);
    const std::uint32_t lengths[] = {length - header};
    CHECK_OK(kvstrata::seal_record(bytes, length, spec, lengths, 1));
  }
  const char* payload() const {
    return reinterpret_cast<const char*>(bytes + kvstrata::record_header_bytes(1));
  }
  std::uint32_t length;
  std::unique_ptr<std::uint8_t, void (*)(void*)> memory;
  std::uint8_t* bytes;
};

struct Disk {
  Disk() {
    std::string pattern = std::string(std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") +
                          "/kvstrata-disk-XXXXXX";
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    root = pattern;
    options.folder = root + "/deep/log";
    options.capacity_bytes = 16 * 128 * 1024;
    options.own_threads = false;
  }
  ~Disk() {
    log.reset();
    const std::string command = "rm -rf '" + root + "'";
    if (std::system(command.c_str()) != 0) std::abort();
  }

  static kvstrata::Digest key_of(int number) {
    kvstrata::Digest key{};
    std::memcpy(key.data(), &number, sizeof(number));
    key[31] = 1;
    return key;
  }

  std::string try_open() {
    log.reset();
    log = std::make_unique<kvstrata::DiskLog>(options, *files);
    kvstrata::ConnectorContext context;
    context.instance_id = "first";
    return log->open(context);
  }
  void open() { CHECK_EQ(try_open(), std::string()); }
  void reopen() { open(); }

  std::vector<kvstrata::PutStatus> put(const std::vector<int>& keys, int parent = 0) {
    std::vector<Extent> extents;
    std::vector<kvstrata::PutItem> items;
    for (const int key : keys)
      extents.emplace_back(key, 0, parent);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      kvstrata::PutItem item;
      item.key = key_of(keys[i]);
      item.bytes = extents[i].bytes;
      item.length = extents[i].length;
      items.push_back(item);
    }
    log->put(items);
    log->put_end(items);
    std::vector<kvstrata::PutStatus> statuses;
    for (const kvstrata::PutItem& item : items)
      statuses.push_back(item.status);
    return statuses;
  }
  void put(int begin, int end) {
    std::vector<int> keys;
    for (int key = begin; key < end; ++key)
      keys.push_back(key);
    for (const kvstrata::PutStatus status : put(keys))
      CHECK(status == kvstrata::PutStatus::kStored);
  }

  bool present(int number) {
    kvstrata::ExistsItem item{.key = key_of(number)};
    log->exists(std::span(&item, 1));
    return item.presence == kvstrata::Presence::kPresent;
  }

  // As a lane does: checked, and removed where bad.
  kvstrata::LoadStatus load(int number, std::uint32_t length = Extent(-1).length) {
    Extent extent(-1, length);
    kvstrata::LoadItem item;
    item.key = key_of(number);
    item.bytes = extent.bytes;
    item.length = length;
    log->load(std::span(&item, 1));
    if (item.status == kvstrata::LoadStatus::kLoaded &&
        !kvstrata::verify_record(item.bytes, length, &item.key).ok())
      item.status = kvstrata::LoadStatus::kCorrupt;
    if (item.status == kvstrata::LoadStatus::kCorrupt) log->remove_corrupt(item);
    return item.status;
  }

  void remove(const std::vector<int>& keys) {
    std::vector<kvstrata::DeleteItem> items;
    for (const int key : keys)
      items.push_back({.key = key_of(key)});
    log->remove(items);
    for (const kvstrata::DeleteItem& item : items)
      CHECK(item.removed);
  }

  std::uint64_t count(const char* name) {
    std::vector<kvstrata::ConnectorCount> counts;
    log->counts(&counts);
    for (const kvstrata::ConnectorCount& count : counts)
      if (std::string(count.name) == name) return count.value;
    return ~std::uint64_t{0};
  }

  std::uint64_t bytes_on_medium() {
    std::vector<kvstrata::FolderEntry> entries;
    CHECK_OK(kvstrata::posix_files().list(options.folder, &entries));
    std::uint64_t bytes = 0;
    for (const kvstrata::FolderEntry& entry : entries) {
      kvstrata::FileStat found;
      CHECK_OK(kvstrata::posix_files().stat(options.folder + "/" + entry.name, &found));
      if (entry.name != ".kvstrata.lock") bytes += found.length;
    }
    return bytes;
  }

  std::string root;
  kvstrata::DiskOptions options;
  kvstrata::FileLayer* files = &kvstrata::posix_files();
  std::unique_ptr<kvstrata::DiskLog> log;
};
