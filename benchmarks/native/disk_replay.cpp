// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Replays accesses to a disk log of any size in memory. The log is the real one, on sparse files in
// FOLDER, a tmpfs: payloads are all zeros and take no memory, but frames, tables, headers and
// checksums are written and read as always.
//
//   disk_replay CAPACITY_BYTES RECORD_BYTES FOLDER < accesses
//
// A line of standard input is one of these; IDs are whole numbers and name records.
//
//   put ID...    puts the records in one batch
//   load ID...   loads the records that are stored
//   use ID...    does the work of a request: loads the leading records that are stored and puts the
//                others
//   counts       prints one line of JSON: the log's counters and usage, and the numbers of loads
//                that were requested and made
//
// The log makes segments ready when a batch ends and not in a thread of its own, so that the same
// accesses give the same numbers.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "disk/log.h"
#include "hash/crc32c.h"
#include "record/record.h"
#include "support/hooked_files.h"

using namespace kvstrata;

namespace {

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "disk_replay: %s\n", why.c_str());
  std::exit(1);
}

// A key for each number. Its bits must be evenly distributed, because the log uses them as a hash.
Digest key_of(std::uint64_t number) {
  Digest key;
  for (std::size_t at = 0; at < key.size(); at += 8) {
    std::uint64_t bits = (number += 0x9e3779b97f4a7c15);
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    bits ^= bits >> 31;
    std::memcpy(key.data() + at, &bits, 8);
  }
  return key;
}

bool is_zero(const unsigned char* bytes, std::size_t length) {
  static constexpr unsigned char kZeros[kFileBlockBytes] = {};
  return std::memcmp(bytes, kZeros, length) == 0;
}

// As File::write, but zeros take no room where there are none but zeros.
Status write_sparse(File& file, std::span<const WritePart> parts, std::uint64_t offset) {
  const auto write = [&](const unsigned char* bytes, std::uint64_t at, std::size_t length) {
    const WritePart part[] = {{bytes, length}};
    return file.write(part, at);
  };
  for (const WritePart& part : parts) {
    const auto* bytes = static_cast<const unsigned char*>(part.bytes);
    const std::uint64_t end = offset + part.length;
    std::uint64_t data = file.next_data(offset);
    while (offset < end) {
      const std::size_t length = std::min(kFileBlockBytes - offset % kFileBlockBytes, end - offset);
      if (data < offset) data = file.next_data(offset);
      if (data < offset + length || !is_zero(bytes, length))
        KVSTRATA_RETURN_IF_ERROR(write(bytes, offset, length));
      bytes += length;
      offset += length;
    }
  }
  std::uint64_t length = 0;
  KVSTRATA_RETURN_IF_ERROR(file.length(&length));
  return length >= offset ? Status() : file.truncate(offset);
}

Status grow(File& file, std::uint64_t length) {
  std::uint64_t there = 0;
  KVSTRATA_RETURN_IF_ERROR(file.length(&there));
  return there >= length ? Status() : file.truncate(length);
}

class Replay {
 public:
  Replay(std::uint64_t capacity_bytes, std::uint64_t record_bytes, const std::string& folder)
      : length_(static_cast<std::uint32_t>(record_bytes)),
        memory_(record_bytes),
        payload_bytes_(record_bytes - record_header_bytes(1)),
        payload_crc_(crc32c(memory_.data(), payload_bytes_)),
        log_(DiskOptions{.folder = folder,
                         .capacity_bytes = capacity_bytes,
                         .direct = false,
                         .own_threads = false},
             files_) {
    files_.write = write_sparse;
    files_.allocate = grow;
    const std::string wrong = log_.open(ConnectorContext{.instance_id = "disk_replay"});
    if (!wrong.empty()) fail(wrong);
  }

  void put(const std::vector<std::uint64_t>& numbers) {
    std::vector<PutItem> batch(numbers.size());
    for (std::size_t at = 0; at < batch.size(); ++at) {
      PutItem& item = batch[at];
      item.key = key_of(numbers[at]);
      item.bytes = bytes();
      item.length = length_;
      Section section{
          .offset = 0, .length = static_cast<std::uint32_t>(payload_bytes_), .crc = payload_crc_};
      const RecordSpec spec{.key = item.key, .chunk_tokens = 256, .created_unix_ms = 1};
      const Status status = write_record_header(bytes(), length_, spec, &section, 1);
      if (!status.ok()) fail(status.message());
      log_.put(std::span(&item, 1));
    }
    log_.put_end(batch);
    for (const PutItem& item : batch) {
      if (item.status != PutStatus::kStored && item.status != PutStatus::kExists)
        fail(std::string("put: ") + item.reason);
    }
    std::vector<Digest> evicted;
    log_.take_evicted(&evicted);
  }

  void load(const std::vector<std::uint64_t>& numbers) {
    asked_ += numbers.size();
    for (const std::uint64_t number : numbers) {
      if (is_there(number)) load_one(number);
    }
  }

  void use(const std::vector<std::uint64_t>& numbers) {
    asked_ += numbers.size();
    std::size_t at = 0;
    for (; at < numbers.size() && is_there(numbers[at]); ++at)
      load_one(numbers[at]);
    const std::size_t most = log_.capabilities().max_batch;
    while (at < numbers.size()) {
      const std::size_t end = std::min(numbers.size(), at + most);
      put({numbers.begin() + static_cast<std::ptrdiff_t>(at),
           numbers.begin() + static_cast<std::ptrdiff_t>(end)});
      at = end;
    }
  }

  void print_counts() {
    const ConnectorUsage usage = log_.usage();
    std::vector<ConnectorCount> counts{{"used_bytes", usage.used_bytes},
                                       {"records", usage.records},
                                       {"asked", asked_},
                                       {"loaded", loaded_}};
    log_.counts(&counts);
    const char* before = "{";
    for (const ConnectorCount& count : counts) {
      std::printf("%s\"%s\": %" PRIu64, before, count.name, count.value);
      before = ", ";
    }
    std::printf("}\n");
  }

 private:
  std::uint8_t* bytes() { return memory_.data(); }

  bool is_there(std::uint64_t number) {
    ExistsItem item{.key = key_of(number)};
    log_.exists(std::span(&item, 1));
    return item.presence == Presence::kPresent;
  }

  // Loads a record and verifies it, as a lane does.
  void load_one(std::uint64_t number) {
    LoadItem item;
    item.key = key_of(number);
    item.bytes = bytes();
    item.length = length_;
    log_.load(std::span(&item, 1));
    if (item.status != LoadStatus::kLoaded) fail(std::string("load: ") + item.reason);
    const Status status = verify_record(item.bytes, length_, &item.key);
    if (!status.ok()) fail(std::string("load: ") + status.message());
    ++loaded_;
  }

  // Memory for a record. The bytes behind the header are always zeros, also after a load, because
  // all payloads are zeros.
  struct Memory {
    explicit Memory(std::uint64_t bytes)
        : start(
              static_cast<std::uint8_t*>(std::aligned_alloc(kFileBlockBytes, whole_blocks(bytes))),
              std::free) {
      if (start == nullptr) fail("no memory for a record");
      std::memset(start.get(), 0, whole_blocks(bytes));
    }
    std::uint8_t* data() const { return start.get(); }
    std::unique_ptr<std::uint8_t, void (*)(void*)> start;
  };

  testing::HookedFiles files_;
  const std::uint32_t length_;
  const Memory memory_;
  const std::uint64_t payload_bytes_;
  const std::uint32_t payload_crc_;
  DiskLog log_;
  std::uint64_t asked_ = 0;
  std::uint64_t loaded_ = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count != 4) fail("needs CAPACITY_BYTES RECORD_BYTES FOLDER");
  const std::uint64_t capacity_bytes = std::strtoull(words[1], nullptr, 10);
  const std::uint64_t record_bytes = std::strtoull(words[2], nullptr, 10);
  if (capacity_bytes < kMinDiskBytes) fail("CAPACITY_BYTES: too small for a log");
  if (record_bytes <= record_header_bytes(1) || record_bytes > UINT32_MAX)
    fail("RECORD_BYTES: more than 4096, less than 4 GiB");
  Replay replay(capacity_bytes, record_bytes, words[3]);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream parts(line);
    std::string verb;
    parts >> verb;
    std::vector<std::uint64_t> numbers;
    for (std::uint64_t number; parts >> number;)
      numbers.push_back(number);
    if (!parts.eof()) fail("not a number in: " + line);
    if (verb == "put") {
      replay.put(numbers);
    } else if (verb == "load") {
      replay.load(numbers);
    } else if (verb == "use") {
      replay.use(numbers);
    } else if (verb == "counts") {
      replay.print_counts();
    } else {
      fail("unknown access: " + line);
    }
  }
}
