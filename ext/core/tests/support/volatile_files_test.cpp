// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "support/volatile_files.h"

#include <functional>
#include <set>

#include "support/check.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

using Bytes = std::vector<unsigned char>;

constexpr std::uint64_t kSeeds = 100;

std::unique_ptr<File> open_file(FileLayer& files, const std::string& path, FileMode mode,
                                bool direct = false) {
  std::unique_ptr<File> file;
  CHECK_OK(files.open(path, mode, direct, &file));
  return file;
}

Status write(File& file, std::uint64_t offset, const Bytes& bytes) {
  const WritePart parts[] = {{bytes.data(), bytes.size()}};
  return file.write(parts, offset);
}

Bytes content(FileLayer& files, const std::string& path) {
  const std::unique_ptr<File> file = open_file(files, path, FileMode::kRead);
  std::uint64_t length = 0;
  CHECK_OK(file->length(&length));
  Bytes bytes(length);
  const ReadPart parts[] = {{bytes.data(), bytes.size()}};
  CHECK_OK(file->read(parts, 0));
  return bytes;
}

bool is_there(FileLayer& files, const std::string& path) {
  FileStat found;
  const Status status = files.stat(path, &found);
  CHECK(status.ok() || status.detail(0) == ENOENT);
  return status.ok();
}

// A file with a durable name and these durable bytes.
void make_durable(FileLayer& files, const std::string& path, const Bytes& bytes) {
  const std::unique_ptr<File> file = open_file(files, path, FileMode::kCreate);
  CHECK_OK(write(*file, 0, bytes));
  CHECK_OK(file->sync());
  CHECK_OK(files.sync_folder(path.substr(0, std::max<std::size_t>(1, path.rfind('/')))));
}

// Every way in which a cut can end, many times the one that is left to the seed.
void for_each_cut(VolatileFiles& files, const std::function<void(VolatileFiles&)>& look) {
  for (const Kept kept : kAllKept) {
    const std::uint64_t seeds = kept == Kept::kRandom ? kSeeds : 1;
    for (std::uint64_t seed = 0; seed < seeds; ++seed)
      look(*files.cut(kept, seed));
  }
}

TEST(unsynced_writes_are_torn_between_blocks_of_512_bytes_and_never_within) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(4096, 1));
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kReadWrite);
  CHECK_OK(write(*file, 256, Bytes(2048, 2)));
  CHECK_OK(write(*file, 1024, Bytes(512, 3)));
  std::set<Bytes> seen;
  std::set<unsigned char> at_1024;
  for_each_cut(files, [&](VolatileFiles& after) {
    const Bytes bytes = content(after, "/file");
    CHECK_EQ(bytes.size(), 4096u);
    const std::size_t edges[] = {0, 256, 512, 1024, 1536, 2048, 2304, 4096};
    for (std::size_t i = 0; i + 1 < std::size(edges); ++i)
      CHECK(std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(edges[i]),
                        bytes.begin() + static_cast<std::ptrdiff_t>(edges[i + 1]),
                        [&](unsigned char byte) { return byte == bytes[edges[i]]; }));
    CHECK_EQ(bytes[0], 1);
    CHECK_EQ(bytes[2304], 1);
    seen.insert(bytes);
    at_1024.insert(bytes[1024]);
  });
  CHECK(seen.size() > 15);
  // Also the later write without the earlier one.
  CHECK_EQ(at_1024.size(), 3u);
}

TEST(lengths_after_a_cut_lie_between_the_synced_and_the_written_one) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(100, 1));
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kReadWrite);
  CHECK_OK(write(*file, 100, Bytes(5000, 2)));
  std::set<std::size_t> lengths;
  bool zeros = false;
  for_each_cut(files, [&](VolatileFiles& after) {
    const Bytes bytes = content(after, "/file");
    CHECK(bytes.size() >= 100 && bytes.size() <= 5100);
    lengths.insert(bytes.size());
    zeros = zeros || bytes == [] {
      Bytes grown(5100, 0);
      std::fill_n(grown.begin(), 100, 1);
      return grown;
    }();
  });
  CHECK(lengths.contains(100) && lengths.contains(5100) && lengths.size() > 4);
  CHECK(zeros);
}

// Which of the names are there, as bits; what is there has the bytes of the file.
unsigned names_of(VolatileFiles& files, const std::vector<std::string>& names, const Bytes& bytes) {
  unsigned there = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!is_there(files, names[i])) continue;
    CHECK(content(files, names[i]) == bytes);
    there |= 1U << i;
  }
  return there;
}

TEST(a_renamed_file_is_under_its_old_name_its_new_one_or_both_and_never_under_none) {
  for (const std::string to : {"/new", "/folder/new"}) {
    VolatileFiles files;
    CHECK_OK(files.make_folder("/folder"));
    make_durable(files, "/old", Bytes(10, 1));
    CHECK_OK(files.rename("/old", to));
    std::set<unsigned> seen;
    for_each_cut(files, [&](VolatileFiles& after) {
      seen.insert(names_of(after, {"/old", to}, Bytes(10, 1)));
    });
    CHECK(seen == (std::set<unsigned>{1, 2, 3}));
  }
}

TEST(a_process_that_dies_loses_nothing_and_makes_nothing_durable) {
  VolatileFiles files;
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate);
  CHECK_OK(write(*file, 0, Bytes(3000, 1)));
  const std::unique_ptr<VolatileFiles> after = files.kill();
  CHECK_EQ(write(*file, 0, Bytes(10, 2)).detail(0), EIO);
  CHECK(content(*after, "/file") == Bytes(3000, 1));
  CHECK(!is_there(*after->cut(Kept::kNothing, 0), "/file"));
  CHECK(content(*after->cut(Kept::kNames, 0), "/file").empty());
  CHECK(content(*after->cut(Kept::kEverything, 0), "/file") == Bytes(3000, 1));
}

TEST(after_the_last_step_every_call_fails_and_nothing_changes) {
  std::set<std::size_t> lengths;
  std::set<bool> renamed;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    VolatileFiles files;
    make_durable(files, "/file", Bytes(10, 1));
    const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kReadWrite);
    const std::uint64_t steps = files.steps();
    CHECK_EQ(steps, 4u);
    files.stop_at(steps + 2, seed);
    CHECK_OK(write(*file, 10, Bytes(10, 1)));
    if (seed % 2 == 0) {
      CHECK_EQ(write(*file, 20, Bytes(2000, 1)).detail(0), EIO);
    } else {
      CHECK_EQ(files.rename("/file", "/renamed").detail(0), EIO);
    }
    CHECK(files.stopped());
    std::vector<FolderEntry> entries;
    std::unique_ptr<File> other;
    std::unique_ptr<FileLock> lock;
    std::string holder;
    FileStat found;
    FileSpace space;
    std::uint64_t length = 0;
    unsigned char byte = 0;
    const ReadPart parts[] = {{&byte, 1}};
    for (const Status& status :
         {file->read(parts, 0), write(*file, 0, Bytes(10, 7)), file->sync(), file->allocate(9999),
          file->truncate(0), file->length(&length), file->set_access_time(1),
          files.open("/new", FileMode::kCreate, false, &other), files.rename("/file", "/x"),
          files.unlink("/file"), files.make_folder("/folder"), files.sync_folder("/"),
          files.stat("/file", &found), files.list("/", &entries), files.space("/", &space),
          files.lock("/lock", &lock, &holder)})
      CHECK_EQ(status.detail(0), EIO);
    CHECK_EQ(files.steps(), steps + 2);
    const std::unique_ptr<VolatileFiles> after = files.kill();
    CHECK_OK(after->list("/", &entries));
    CHECK_EQ(entries.size(), 1u);
    renamed.insert(is_there(*after, "/renamed"));
    const Bytes bytes = content(*after, "/" + entries[0].name);
    CHECK(bytes == Bytes(bytes.size(), 1));
    CHECK(bytes.size() >= 20 && bytes.size() <= 2020);
    lengths.insert(bytes.size());
  }
  CHECK_EQ(renamed.size(), 2u);
  CHECK(lengths.size() >= 4);
}

TEST(a_sync_that_failed_is_not_healed_by_the_next) {
  VolatileFiles medium;
  HookedFiles files(medium);
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate);
  CHECK_OK(files.sync_folder("/"));
  CHECK_OK(write(*file, 0, Bytes(512, 1)));
  files.fail_all("sync", EIO);
  CHECK_EQ(file->sync().detail(0), EIO);
  files.heal("sync");
  CHECK_OK(write(*file, 512, Bytes(512, 2)));
  CHECK_OK(file->sync());
  std::set<unsigned char> first;
  for_each_cut(medium, [&](VolatileFiles& after) {
    const Bytes bytes = content(after, "/file");
    CHECK_EQ(bytes.size(), 1024u);
    CHECK_EQ(bytes[512], 2);
    first.insert(bytes[0]);
  });
  CHECK_EQ(first.size(), 2u);
}

}  // namespace
