// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "support/sparse_files.h"

#include <cerrno>
#include <random>

#include "support/check.h"
#include "support/disk_log_fixture.h"

using namespace kvstrata;
using kvstrata::testing::SparseFiles;

namespace {

constexpr std::uint32_t kRecord = 64 * 1024;

TEST(what_is_written_comes_back_whatever_its_place_and_length) {
  SparseFiles files;
  std::unique_ptr<File> file;
  CHECK_OK(files.open("/file", FileMode::kCreate, false, &file));
  std::vector<unsigned char> expected;
  std::mt19937 draw(7);
  for (int step = 0; step < 2000; ++step) {
    const std::uint64_t offset = draw() % 40'000;
    if (draw() % 20 == 0) {
      CHECK_OK(file->truncate(offset));
      expected.resize(offset);
      continue;
    }
    // As many zeros as other bytes: both make and free blocks.
    const std::vector<unsigned char> bytes(1 + draw() % 10'000, draw() % 2 == 0 ? 0 : draw() % 256);
    const std::size_t cut = draw() % bytes.size();
    const WritePart parts[] = {{bytes.data(), cut}, {bytes.data() + cut, bytes.size() - cut}};
    CHECK_OK(file->write(parts, offset));
    expected.resize(std::max<std::size_t>(expected.size(), offset + bytes.size()));
    std::copy(bytes.begin(), bytes.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));
    std::uint64_t length = 0;
    CHECK_OK(file->length(&length));
    CHECK_EQ(length, expected.size());
    std::vector<unsigned char> found(length, 0xA5);
    const std::size_t half = length / 2;
    const ReadPart read[] = {{found.data(), half}, {found.data() + half, length - half}};
    CHECK_OK(file->read(read, 0));
    CHECK(found == expected);
  }
  unsigned char byte;
  const ReadPart beyond[] = {{&byte, 1}};
  CHECK(file->read(beyond, expected.size()).code() == StatusCode::kOutOfRange);
}

TEST(zeros_take_no_room_also_where_something_was) {
  SparseFiles files;
  std::unique_ptr<File> file;
  CHECK_OK(files.open("/file", FileMode::kCreate, true, &file));
  std::vector<unsigned char> bytes(64 * 4096);
  const WritePart part[] = {{bytes.data(), bytes.size()}};
  CHECK_OK(file->allocate(1 << 30));
  CHECK_OK(file->write(part, 4096));
  CHECK_EQ(files.kept_bytes(), 0u);
  bytes[5 * 4096 + 17] = 1;
  CHECK_OK(file->write(part, 4096));
  CHECK_EQ(files.kept_bytes(), 4096u);
  bytes[5 * 4096 + 17] = 0;
  CHECK_OK(file->write(part, 4096));
  CHECK_EQ(files.kept_bytes(), 0u);
  CHECK(file->write(part, 1).code() == StatusCode::kBadArgument);
}

TEST(names_are_as_in_a_file_system) {
  SparseFiles files;
  std::unique_ptr<File> file;
  CHECK(is_os_error(files.open("/no/file", FileMode::kCreate, false, &file), ENOENT));
  CHECK(is_os_error(files.open("/file", FileMode::kRead, false, &file), ENOENT));
  CHECK_OK(make_folders(files, "/a/b"));
  CHECK(is_os_error(files.make_folder("/a"), EEXIST));
  CHECK_OK(files.open("/a/file", FileMode::kCreate, false, &file));
  CHECK(is_os_error(files.open("/a/file", FileMode::kCreate, false, &file), EEXIST));
  CHECK_OK(files.rename("/a/file", "/a/b/file"));
  std::vector<FolderEntry> entries;
  CHECK_OK(files.list("/a", &entries));
  CHECK_EQ(entries.size(), 1u);
  CHECK(entries[0].name == "b" && entries[0].is_folder);
  CHECK_OK(files.list("/a/b", &entries));
  CHECK_EQ(entries.size(), 1u);
  CHECK(entries[0].name == "file" && entries[0].is_file);
  CHECK(is_os_error(files.list("/a/b/file", &entries), ENOTDIR));
  CHECK_OK(files.unlink("/a/b/file"));
  CHECK(is_os_error(files.unlink("/a/b/file"), ENOENT));
  std::unique_ptr<FileLock> first;
  std::unique_ptr<FileLock> second;
  std::string holder;
  CHECK_OK(files.lock("/a/lock", &first, &holder));
  first->note("me");
  CHECK(files.lock("/a/lock", &second, &holder).code() == StatusCode::kBusy);
  CHECK_EQ(holder, std::string("me"));
  first.reset();
  CHECK_OK(files.lock("/a/lock", &second, &holder));
}

// Records of zeros in a log that makes its segments ready when a batch ends.
struct Log {
  Log(FileLayer& layer, const std::string& folder) : files(layer) {
    options.folder = folder;
    options.capacity_bytes = 32 << 20;
    options.own_threads = false;
    open();
  }
  void open() {
    log.reset();
    log = std::make_unique<DiskLog>(options, files);
    CHECK_EQ(log->open(ConnectorContext{}), std::string());
  }
  void put(int number) {
    Extent extent(-1, kRecord);
    std::memset(extent.bytes, 0, kRecord);
    RecordSpec spec;
    spec.key = Disk::key_of(number);
    const std::uint32_t lengths[] = {kRecord - static_cast<std::uint32_t>(record_header_bytes(1))};
    CHECK_OK(seal_record(extent.bytes, kRecord, spec, lengths, 1));
    PutItem item;
    item.key = spec.key;
    item.bytes = extent.bytes;
    item.length = kRecord;
    log->put(std::span(&item, 1));
    log->put_end(std::span(&item, 1));
    CHECK(item.status == PutStatus::kStored);
  }
  bool load(int number) {
    Extent extent(-1, kRecord);
    std::memset(extent.bytes, 0xA5, kRecord);
    LoadItem item;
    item.key = Disk::key_of(number);
    item.bytes = extent.bytes;
    item.length = kRecord;
    log->load(std::span(&item, 1));
    if (item.status != LoadStatus::kLoaded) return false;
    CHECK_OK(verify_record(item.bytes, item.length, &item.key));
    return true;
  }
  // Three times what fits; every fifth record is loaded again and again, among others.
  void fill() {
    std::mt19937 draw(11);
    for (int number = 0; number < 1500; ++number) {
      put(number);
      (void)load(static_cast<int>(draw() % static_cast<unsigned>(number + 1)) / 5 * 5);
    }
  }
  std::string counts() {
    std::vector<ConnectorCount> counts{{"used_bytes", log->usage().used_bytes},
                                       {"records", log->usage().records}};
    log->counts(&counts);
    std::string text;
    for (const ConnectorCount& count : counts)
      text += std::string(count.name) + " " + std::to_string(count.value) + "\n";
    return text;
  }
  FileLayer& files;
  DiskOptions options;
  std::unique_ptr<DiskLog> log;
};

TEST(a_log_of_records_of_zeros_is_found_again_and_takes_a_few_blocks_a_record) {
  SparseFiles files;
  Log log(files, "/log");
  log.fill();
  const std::uint64_t records = log.log->usage().records;
  CHECK(records > 350 && records < 512);
  CHECK(files.kept_bytes() < records * 3 * kFileBlockBytes + (1 << 20));
  log.open();
  CHECK_EQ(log.log->usage().records, records);
  CHECK(log.load(1499) && !log.load(1));
}

// What a log on these files writes, evicts and writes again is what it would on a disk.
TEST(a_log_counts_the_same_as_on_real_files) {
  SparseFiles files;
  Log sparse(files, "/log");
  const Disk folder;
  Log real(posix_files(), folder.root + "/log");
  sparse.fill();
  real.fill();
  CHECK_EQ(sparse.counts(), real.counts());
  CHECK(sparse.counts().find("reinserted_records 0\n") == std::string::npos);
}

}  // namespace
