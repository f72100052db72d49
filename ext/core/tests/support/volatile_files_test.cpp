// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Size: each test is one promise of the medium.
#include "support/volatile_files.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <set>
#include <thread>

#include "support/check.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

using Bytes = std::vector<unsigned char>;

constexpr std::uint64_t kSeeds = 300;

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

TEST(what_was_synced_survives_every_cut) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(3000, 1));
  for_each_cut(files, [](VolatileFiles& after) {
    CHECK(content(after, "/file") == Bytes(3000, 1));
    for_each_cut(after,
                 [](VolatileFiles& later) { CHECK(content(later, "/file") == Bytes(3000, 1)); });
  });
}

TEST(what_is_settled_survives_every_cut) {
  VolatileFiles files;
  CHECK_OK(files.make_folder("/folder"));
  CHECK_OK(write(*open_file(files, "/folder/file", FileMode::kCreate), 0, Bytes(10, 1)));
  const std::uint64_t steps = files.steps();
  files.settle();
  CHECK_EQ(files.steps(), steps);
  for_each_cut(files,
               [](VolatileFiles& after) { CHECK(content(after, "/folder/file") == Bytes(10, 1)); });
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

TEST(allocation_and_truncation_are_durable_once_synced_and_may_be_lost_before) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(1000, 1));
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kReadWrite);
  CHECK_OK(file->truncate(10));
  CHECK_OK(file->allocate(8192));
  std::set<std::size_t> lengths;
  for_each_cut(files,
               [&](VolatileFiles& after) { lengths.insert(content(after, "/file").size()); });
  CHECK(lengths == (std::set<std::size_t>{10, 1000, 8192}));
  VolatileFiles other;
  make_durable(other, "/file", Bytes(1000, 1));
  const std::unique_ptr<File> synced = open_file(other, "/file", FileMode::kReadWrite);
  CHECK_OK(synced->truncate(10));
  CHECK_OK(synced->allocate(8192));
  CHECK_OK(synced->sync());
  Bytes expected(8192, 0);
  std::fill_n(expected.begin(), 10, 1);
  for_each_cut(other, [&](VolatileFiles& after) { CHECK(content(after, "/file") == expected); });
}

TEST(a_name_that_was_not_synced_may_be_missing_though_its_bytes_were) {
  VolatileFiles files;
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate);
  CHECK_OK(write(*file, 0, Bytes(10, 1)));
  CHECK_OK(file->sync());
  std::set<bool> seen;
  for_each_cut(files, [&](VolatileFiles& after) {
    seen.insert(is_there(after, "/file"));
    if (is_there(after, "/file")) CHECK(content(after, "/file") == Bytes(10, 1));
  });
  CHECK_EQ(seen.size(), 2u);
}

TEST(a_removal_that_was_not_synced_may_be_undone) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(10, 1));
  CHECK_OK(files.unlink("/file"));
  std::set<bool> seen;
  for_each_cut(files, [&](VolatileFiles& after) {
    seen.insert(is_there(after, "/file"));
    if (is_there(after, "/file")) CHECK(content(after, "/file") == Bytes(10, 1));
  });
  CHECK_EQ(seen.size(), 2u);
  VolatileFiles other;
  make_durable(other, "/file", Bytes(10, 1));
  CHECK_OK(other.unlink("/file"));
  CHECK_OK(other.sync_folder("/"));
  for_each_cut(other, [&](VolatileFiles& after) { CHECK(!is_there(after, "/file")); });
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

TEST(a_rename_over_a_file_leaves_the_one_or_the_other_there) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(10, 1));
  make_durable(files, "/part", Bytes(20, 2));
  CHECK_OK(files.rename("/part", "/file"));
  CHECK(content(files, "/file") == Bytes(20, 2));
  std::set<std::size_t> seen;
  for_each_cut(files, [&](VolatileFiles& after) {
    const std::size_t length = content(after, "/file").size();
    CHECK(length == 20 || is_there(after, "/part"));
    seen.insert(length);
  });
  CHECK_EQ(seen.size(), 2u);
}

TEST(a_chain_of_renames_and_a_new_file_of_the_old_name_lose_nothing) {
  VolatileFiles files;
  make_durable(files, "/a", Bytes(10, 1));
  CHECK_OK(files.rename("/a", "/b"));
  CHECK_OK(files.rename("/b", "/c"));
  make_durable(files, "/other", {});  // syncs the folder
  CHECK_OK(files.rename("/c", "/d"));
  open_file(files, "/c", FileMode::kCreate);
  CHECK_OK(files.rename("/d", "/e"));
  std::set<std::string> seen;
  for_each_cut(files, [&](VolatileFiles& after) {
    CHECK(!is_there(after, "/a") && !is_there(after, "/b"));
    std::string where;
    for (const std::string name : {"/c", "/d", "/e"})
      if (is_there(after, name) && content(after, name) == Bytes(10, 1)) where += name;
    CHECK(where != "");
    seen.insert(where);
  });
  CHECK(seen.size() >= 5);
}

TEST(syncing_either_folder_of_a_rename_keeps_the_file) {
  for (const std::string synced : {"/from", "/to"}) {
    VolatileFiles files;
    CHECK_OK(files.make_folder("/from"));
    CHECK_OK(files.sync_folder("/"));
    make_durable(files, "/from/file", Bytes(10, 1));
    CHECK_OK(files.make_folder("/to"));
    CHECK_OK(files.rename("/from/file", "/to/file"));
    CHECK_OK(files.sync_folder(synced));
    std::set<unsigned> seen;
    for_each_cut(files, [&](VolatileFiles& after) {
      seen.insert(names_of(after, {"/from/file", "/to/file"}, Bytes(10, 1)));
    });
    // The old name is gone once its folder is synced; a folder is itself a name to be synced.
    CHECK(seen == (synced == "/from" ? std::set<unsigned>{2} : std::set<unsigned>{1, 2, 3}));
  }
}

TEST(what_is_in_a_folder_goes_with_it_until_its_own_name_is_synced) {
  VolatileFiles files;
  CHECK_OK(files.make_folder("/folder"));
  make_durable(files, "/folder/part", Bytes(10, 1));
  CHECK_OK(files.rename("/folder/part", "/folder/file"));
  CHECK_OK(files.sync_folder("/folder"));
  std::set<bool> seen;
  for_each_cut(files, [&](VolatileFiles& after) {
    seen.insert(is_there(after, "/folder"));
    CHECK_EQ(is_there(after, "/folder"), is_there(after, "/folder/file"));
  });
  CHECK_EQ(seen.size(), 2u);
}

TEST(a_folder_keeps_one_name) {
  VolatileFiles files;
  CHECK_OK(files.make_folder("/old"));
  CHECK_OK(files.sync_folder("/"));
  make_durable(files, "/old/file", Bytes(10, 1));
  CHECK_OK(files.rename("/old", "/new"));
  CHECK_EQ(files.rename("/new", "/new/inner").detail(0), EINVAL);
  std::set<unsigned> seen;
  for_each_cut(files, [&](VolatileFiles& after) {
    seen.insert(names_of(after, {"/old/file", "/new/file"}, Bytes(10, 1)));
  });
  CHECK(seen == (std::set<unsigned>{1, 2}));
}

TEST(the_extremes_keep_data_or_names) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(2000, 1));
  CHECK_OK(write(*open_file(files, "/file", FileMode::kReadWrite), 0, Bytes(4000, 2)));
  CHECK_OK(files.rename("/file", "/renamed"));
  const auto bytes_after = [&](Kept kept, const std::string& name) {
    return content(*files.cut(kept, 0), name);
  };
  CHECK(bytes_after(Kept::kNothing, "/file") == Bytes(2000, 1));
  CHECK(bytes_after(Kept::kEverything, "/renamed") == Bytes(4000, 2));
  CHECK(bytes_after(Kept::kData, "/file") == Bytes(4000, 2));
  CHECK(bytes_after(Kept::kNames, "/renamed") == Bytes(2000, 1));
  Bytes grown(4000, 0);
  std::fill_n(grown.begin(), 2000, 1);
  CHECK(bytes_after(Kept::kNamesAndLengths, "/renamed") == grown);
}

TEST(the_bytes_of_a_removed_file_stay_for_those_who_have_it_open) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(5000, 1));
  FileSpace before, after;
  CHECK_OK(files.space("/", &before));
  std::unique_ptr<File> file = open_file(files, "/file", FileMode::kRead);
  CHECK_OK(files.unlink("/file"));
  Bytes bytes(5000);
  const ReadPart parts[] = {{bytes.data(), bytes.size()}};
  CHECK_OK(file->read(parts, 0));
  CHECK(bytes == Bytes(5000, 1));
  CHECK_OK(files.space("/", &after));
  CHECK_EQ(after.free_bytes, before.free_bytes);
  file.reset();
  CHECK_OK(files.space("/", &after));
  CHECK_EQ(after.free_bytes, before.free_bytes + 8192);
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

TEST(locks_exclude_others_and_go_with_the_process) {
  VolatileFiles files;
  std::unique_ptr<FileLock> first, second;
  std::string holder;
  CHECK_OK(files.lock("/lock", &first, &holder));
  first->note("pid 7");
  CHECK(files.lock("/lock", &second, &holder).code() == StatusCode::kBusy);
  CHECK_EQ(holder, std::string("pid 7"));
  const std::unique_ptr<VolatileFiles> killed = files.kill();
  CHECK_OK(killed->lock("/lock", &second, &holder));
  second.reset();
  CHECK_OK(killed->lock("/lock", &second, &holder));
  const std::unique_ptr<VolatileFiles> cut = killed->cut(Kept::kEverything, 0);
  CHECK_OK(cut->lock("/lock", &first, &holder));
}

TEST(direct_files_want_whole_blocks) {
  VolatileFiles files;
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate, true);
  CHECK(file->direct());
  CHECK(write(*file, 0, Bytes(4095, 1)).code() == StatusCode::kBadArgument);
  CHECK(write(*file, 512, Bytes(4096, 1)).code() == StatusCode::kBadArgument);
  CHECK_OK(write(*file, 4096, Bytes(8192, 1)));
  VolatileFiles without({.direct = false});
  std::unique_ptr<File> none;
  CHECK(without.open("/file", FileMode::kCreate, true, &none).code() == StatusCode::kUnsupported);
  CHECK(!is_there(without, "/file"));
}

TEST(a_full_medium_says_so) {
  VolatileFiles files({.total_bytes = 10 * 4096});
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate);
  CHECK_OK(file->allocate(6 * 4096));
  CHECK_OK(write(*file, 0, Bytes(6 * 4096, 1)));
  FileSpace space;
  CHECK_OK(files.space("/", &space));
  CHECK_EQ(space.total_bytes, 10 * 4096);
  CHECK_EQ(space.free_bytes, 4 * 4096);
  const std::unique_ptr<File> other = open_file(files, "/other", FileMode::kCreate);
  CHECK_EQ(other->allocate(5 * 4096).detail(0), ENOSPC);
  CHECK_EQ(write(*other, 100, Bytes(5 * 4096, 1)).detail(0), ENOSPC);
  CHECK_EQ(content(files, "/other").size(), 4 * 4096);
  CHECK_OK(files.space("/", &space));
  CHECK_EQ(space.free_bytes, 0u);
  CHECK_OK(file->truncate(4096));
  CHECK_OK(write(*other, 100, Bytes(5 * 4096, 1)));
  CHECK_OK(files.unlink("/file"));
  const std::unique_ptr<VolatileFiles> killed = files.kill();
  CHECK_OK(killed->space("/", &space));
  CHECK_EQ(space.free_bytes, 4 * 4096);
}

TEST(files_answer_as_those_of_the_operating_system) {
  VolatileFiles files;
  std::unique_ptr<File> file;
  FileStat found;
  std::vector<FolderEntry> entries;
  CHECK_EQ(files.open("/none", FileMode::kRead, false, &file).detail(0), ENOENT);
  CHECK_EQ(files.open("/none/file", FileMode::kCreate, false, &file).detail(0), ENOENT);
  make_durable(files, "/file", Bytes(10, 1));
  CHECK_EQ(files.open("/file", FileMode::kCreate, false, &file).detail(0), EEXIST);
  CHECK_EQ(files.open("/file/x", FileMode::kCreate, false, &file).detail(0), ENOTDIR);
  CHECK_OK(files.make_folder("/folder"));
  CHECK_EQ(files.make_folder("/folder").detail(0), EEXIST);
  CHECK_EQ(files.make_folder("/file").detail(0), EEXIST);
  CHECK_EQ(files.unlink("/folder").detail(0), EISDIR);
  CHECK_EQ(files.unlink("/none").detail(0), ENOENT);
  CHECK_EQ(files.rename("/none", "/x").detail(0), ENOENT);
  CHECK_EQ(files.rename("/file", "/folder").detail(0), EISDIR);
  CHECK_EQ(files.sync_folder("/none").detail(0), ENOENT);
  CHECK_EQ(files.list("/none", &entries).detail(0), ENOENT);
  CHECK_OK(files.stat("/folder/", &found));
  CHECK(found.is_folder && !found.is_file);
  CHECK_OK(files.list("/", &entries));
  CHECK_EQ(entries.size(), 2u);
  const std::unique_ptr<File> readable = open_file(files, "/file", FileMode::kRead);
  CHECK_EQ(write(*readable, 0, Bytes(1)).detail(0), EBADF);
  Bytes bytes(11);
  const ReadPart parts[] = {{bytes.data(), bytes.size()}};
  CHECK(readable->read(parts, 0).code() == StatusCode::kOutOfRange);
}

TEST(access_times_are_told_and_lost_at_a_cut) {
  VolatileFiles files;
  make_durable(files, "/file", Bytes(10, 1));
  FileStat before, after;
  CHECK_OK(files.stat("/file", &before));
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kRead);
  CHECK_OK(file->set_access_time(42));
  CHECK_OK(file->sync());
  CHECK_OK(files.stat("/file", &after));
  CHECK_EQ(after.accessed_unix_ns, 42);
  CHECK_EQ(after.modified_unix_ns, before.modified_unix_ns);
  CHECK_OK(files.kill()->stat("/file", &after));
  CHECK_EQ(after.accessed_unix_ns, 42);
  CHECK_OK(files.cut(Kept::kEverything, 0)->stat("/file", &after));
  CHECK(after.accessed_unix_ns != 42);
}

TEST(a_sync_that_failed_is_not_healed_by_the_next) {
  VolatileFiles medium;
  FailingFiles files(medium);
  const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate);
  CHECK_OK(files.sync_folder("/"));
  CHECK_OK(write(*file, 0, Bytes(512, 1)));
  files.fail(FileCall::kSync, 1, EIO);
  CHECK_EQ(file->sync().detail(0), EIO);
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

TEST(calls_fail_when_told_to_and_go_on) {
  const auto try_it = [](FileLayer& below, const std::string& folder) {
    FailingFiles files(below);
    const std::unique_ptr<File> file = open_file(files, folder + "/file", FileMode::kCreate);
    files.fail(FileCall::kWrite, 2, ENOSPC);
    CHECK_OK(write(*file, 0, Bytes(8192, 1)));
    CHECK_EQ(write(*file, 0, Bytes(8192, 2)).detail(0), ENOSPC);
    CHECK_EQ(files.calls(FileCall::kWrite), 2u);
    Bytes half(8192, 2);
    std::fill(half.begin() + 4096, half.end(), 1);
    CHECK(content(files, folder + "/file") == half);
    CHECK_OK(write(*file, 0, Bytes(8192, 2)));
    files.fail_all(FileCall::kRename, EIO);
    CHECK_EQ(files.rename(folder + "/file", folder + "/x").detail(0), EIO);
    CHECK_EQ(files.rename(folder + "/file", folder + "/x").detail(0), EIO);
    CHECK(is_there(below, folder + "/file"));
    files.heal(FileCall::kRename);
    CHECK_OK(files.rename(folder + "/file", folder + "/x"));
    CHECK_OK(files.unlink(folder + "/x"));
  };
  VolatileFiles medium;
  try_it(medium, "");
  std::string folder =
      std::string(std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") + "/kvstrata-fail-XXXXXX";
  CHECK(::mkdtemp(folder.data()) != nullptr);
  try_it(posix_files(), folder);
  CHECK_EQ(::rmdir(folder.c_str()), 0);
}

// The smallest journal: one record of 600 bytes behind the other, a byte each; an acknowledged one
// survives. `bug` leaves one thing out.
enum class Bug { kNone, kNoSync, kNoFolderSync, kTrustsLength };

void append_to_journal(FileLayer& files, unsigned char record, Bug bug) {
  std::unique_ptr<File> file;
  if (!files.open("/journal", FileMode::kReadWrite, false, &file).ok()) {
    file = open_file(files, "/journal", FileMode::kCreate);
    if (bug != Bug::kNoFolderSync) CHECK_OK(files.sync_folder("/"));
  }
  std::uint64_t length = 0;
  CHECK_OK(file->length(&length));
  CHECK_OK(write(*file, length, Bytes(600, record)));
  if (bug != Bug::kNoSync) CHECK_OK(file->sync());
}

// The records that were found, or none where one of them is rubbish.
std::optional<Bytes> read_journal(FileLayer& files, Bug bug) {
  Bytes records;
  if (!is_there(files, "/journal")) return records;
  const Bytes bytes = content(files, "/journal");
  for (std::size_t at = 0; at + 600 <= bytes.size(); at += 600) {
    const bool whole = bytes[at] != 0 && std::all_of(bytes.begin() + at, bytes.begin() + at + 600,
                                                     [&](auto byte) { return byte == bytes[at]; });
    if (!whole && bug != Bug::kTrustsLength) break;
    if (!whole) return std::nullopt;
    records.push_back(bytes[at]);
  }
  return records;
}

bool journal_survives(Bug bug) {
  bool survives = true;
  VolatileFiles files;
  append_to_journal(files, 1, bug);
  append_to_journal(files, 2, bug);
  // The third is not acknowledged.
  CHECK_OK(write(*open_file(files, "/journal", FileMode::kReadWrite), 1200, Bytes(600, 3)));
  for_each_cut(files, [&](VolatileFiles& after) {
    const std::optional<Bytes> found = read_journal(after, bug);
    survives = survives && found && (*found == Bytes{1, 2} || *found == Bytes{1, 2, 3});
  });
  return survives;
}

TEST(a_journal_that_leaves_something_out_is_caught) {
  CHECK(journal_survives(Bug::kNone));
  CHECK(!journal_survives(Bug::kNoSync));
  CHECK(!journal_survives(Bug::kNoFolderSync));
  CHECK(!journal_survives(Bug::kTrustsLength));
}

TEST(each_place_that_syncs_can_be_made_to_do_nothing) {
  const auto sites = std::make_shared<SyncSites>();
  const auto story = [&] {
    VolatileFiles files({}, sites);
    const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate);
    for (unsigned char i = 0; i < 3; ++i) {
      CHECK_OK(write(*file, 0, Bytes(10, i)));
      CHECK_OK(file->sync());
    }
    CHECK_OK(files.sync_folder("/"));
    CHECK_OK(write(*file, 0, Bytes(10, 9)));
    CHECK_OK(file->sync());
    const std::unique_ptr<VolatileFiles> after = files.cut(Kept::kNothing, 0);
    return is_there(*after, "/file") ? content(*after, "/file") : Bytes{};
  };
  CHECK(story() == Bytes(10, 9));
  CHECK_EQ(sites->count(), 3u);
  CHECK(story() == Bytes(10, 9));
  CHECK_EQ(sites->count(), 3u);
  sites->forget(0);
  CHECK(story() == Bytes(10, 9));
  CHECK_EQ(sites->forgotten_calls(), 3u);
  sites->forget(1);
  CHECK(story().empty());
  sites->forget(2);
  CHECK(story() == Bytes(10, 2));
  sites->forget(std::nullopt);
  CHECK(story() == Bytes(10, 9));
  // Addresses at least; with the tools of the compiler, functions and lines.
  CHECK(!sites->describe(0).empty());
}

[[gnu::noinline]] Status sync_through_one_place(File& file) {
  const Status status = file.sync();
  return status;
}

TEST(places_that_sync_through_one_function_are_told_apart_by_their_callers) {
  for (const std::size_t depth : {1, 2}) {
    const auto sites = std::make_shared<SyncSites>(depth);
    VolatileFiles files({}, sites);
    const std::unique_ptr<File> file = open_file(files, "/file", FileMode::kCreate);
    CHECK_OK(sync_through_one_place(*file));
    CHECK_OK(sync_through_one_place(*file));
    CHECK_EQ(sites->count(), depth);
  }
}

TEST(threads_may_write_while_the_power_goes) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    VolatileFiles files;
    files.stop_at(100, seed);
    std::array<std::atomic<unsigned>, 4> synced{};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const std::string path = "/" + std::to_string(t);
        std::unique_ptr<File> file;
        if (!files.open(path, FileMode::kCreate, false, &file).ok()) return;
        if (!files.sync_folder("/").ok()) return;
        for (unsigned char i = 1; i < 100; ++i) {
          if (!write(*file, 0, Bytes(1000, i)).ok() || !file->sync().ok()) return;
          synced[t] = i;
        }
      });
    }
    for (std::thread& thread : threads)
      thread.join();
    CHECK(files.stopped());
    const std::unique_ptr<VolatileFiles> after = files.cut(Kept::kRandom, seed);
    for (unsigned t = 0; t < 4; ++t) {
      if (synced[t] == 0) continue;
      const Bytes bytes = content(*after, "/" + std::to_string(t));
      CHECK(bytes[0] == synced[t] || bytes[0] == synced[t] + 1);
    }
  }
}

TEST(a_seed_tells_the_same_story_again) {
  const auto story = [](std::uint64_t seed) {
    VolatileFiles files({.traces = true});
    files.stop_at(5, seed);
    std::unique_ptr<File> file;
    Status status = files.open("/file", FileMode::kCreate, false, &file);
    for (unsigned char i = 1; status.ok(); ++i)
      status = write(*file, i * 700, Bytes(5000, i));
    CHECK_EQ(files.trace().size(), 5u);
    const std::unique_ptr<VolatileFiles> after = files.cut(Kept::kRandom, seed);
    return is_there(*after, "/file") ? content(*after, "/file") : Bytes{};
  };
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    CHECK(story(seed) == story(seed));
}

}  // namespace
