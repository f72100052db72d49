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
