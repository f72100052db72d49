// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/connector.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <latch>
#include <random>

#include "support/check.h"
#include "support/hooked_files.h"
#include "support/records.h"
#include "support/volatile_files.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

const std::uint64_t kCharge = fs_charge(kLength);

struct OnDisk {
  std::size_t records = 0;
  std::size_t parts = 0;
  std::uint64_t charge = 0;
};

OnDisk on_disk(const std::string& base) {
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

FsOptions fs_options(const std::string& base, std::uint64_t capacity_bytes = 0) {
  FsOptions options;
  options.base_path = base;
  options.capacity_bytes = capacity_bytes;
  options.min_free_bytes = 0;
  return options;
}

Status error(int number) {
  return Status(StatusCode::kOsError, "injected", number);
}

// An open connector on hooked files; what lies there is compared in the end.
struct Fs {
  explicit Fs(std::uint64_t capacity_bytes = 0) : Fs(fs_options("", capacity_bytes)) {}
  explicit Fs(FsOptions options) {
    options.base_path = base;
    connector = std::make_unique<FsConnector>(options, files);
    CHECK_EQ(connector->open({.instance_id = "test"}), std::string());
    (void)connector->usage();  // the scan is over: nothing but the test makes calls from here on
  }
  void fail(const std::string& call, int with) {
    files.before = [=](const std::string& now, const std::string&) {
      return now == call ? error(with) : Status();
    };
  }
  void mend() {
    files.before = [](const std::string&, const std::string&) { return Status(); };
  }
  void check_usage() {
    const ConnectorUsage usage = connector->usage();
    const OnDisk found = on_disk(base);
    CHECK_EQ(usage.records, found.records);
    CHECK_EQ(usage.used_bytes, found.charge);
    CHECK_EQ(found.parts, 0U);
  }
  TestFolder folder;
  std::string base = folder.path + "/kv";
  HookedFiles files;
  std::unique_ptr<FsConnector> connector;
};

// Holds up the first call of a kind until it is let go.
class Gate {
 public:
  Gate(HookedFiles& files, std::string call, std::string part_of_path = "")
      : call_(std::move(call)), part_of_path_(std::move(part_of_path)) {
    files.before = [this](const std::string& now, const std::string& path) {
      if (now == call_ && path.find(part_of_path_) != std::string::npos &&
          !reached_.exchange(true)) {
        arrived_.count_down();
        opened_.wait();
      }
      return Status();
    };
  }
  void until_reached() { arrived_.wait(); }
  void open() { opened_.count_down(); }

 private:
  std::string call_;
  std::string part_of_path_;
  std::atomic<bool> reached_{false};
  std::latch arrived_{1};
  std::latch opened_{1};
};

}  // namespace

TEST(a_temporary_directory_on_another_file_system_is_refused) {
  const TestFolder folder;
  HookedFiles files;
  files.see_stat = [](const std::string& path, FileStat* stat) {
    if (path.ends_with("/tmp")) stat->device += 1;
  };
  FsConnector connector(fs_options(folder.path + "/kv"), files);
  const std::string wrong = connector.open({});
  CHECK(wrong.find("!relative_tmp_dir: 'tmp' is on another file system") == 0);
}

TEST(nothing_is_stored_where_a_write_a_sync_or_a_rename_fails) {
  for (const char* call : {"create", "write", "sync", "rename", "sync_folder", "make_folder"}) {
    Fs fs;
    CHECK(stored(*fs.connector, {1}));
    fs.fail(call, EIO);
    const std::vector<PutItem> items = put_all(*fs.connector, records_of({2, 3}));
    for (const PutItem& item : items) {
      CHECK(item.status == PutStatus::kFailed);
      CHECK_EQ(std::string(item.reason), std::string("io"));
    }
    fs.mend();
    CHECK_EQ(on_disk(fs.base).records, 1U);
    fs.check_usage();
    CHECK(stored(*fs.connector, {2, 3}));
    std::vector<ConnectorNote> notes;
    fs.connector->take_notes(&notes);
    CHECK(std::ranges::any_of(notes, [](const ConnectorNote& note) {
      return note.warning && note.text.find("Input/output error") != std::string::npos;
    }));
  }
}

TEST(a_file_system_that_became_read_only_fails_each_item_of_a_batch_larger_than_the_cap) {
  Fs fs(8 * kCharge);
  fs.files.before = [](const std::string& call, const std::string&) {
    return call == "rename" || call == "unlink" ? error(EROFS) : Status();
  };
  for (const PutItem& item : put_all(*fs.connector, records_of({1, 2, 3, 4, 5, 6})))
    CHECK(item.status == PutStatus::kFailed);
  CHECK_EQ(fs.connector->usage().used_bytes, 0U);
  fs.mend();
  CHECK(stored(*fs.connector, {1, 2, 3, 4, 5, 6}));
}

TEST(a_record_that_cannot_be_unlinked_stays_counted) {
  Fs fs(2 * kCharge);
  CHECK(stored(*fs.connector, {1}));
  CHECK(stored(*fs.connector, {2}));
  fs.fail("unlink", EROFS);
  const std::vector<PutItem> items = put_all(*fs.connector, records_of({3}));
  CHECK(items[0].status == PutStatus::kThrottled);
  CHECK_EQ(std::string(items[0].reason), std::string("capacity"));
  CHECK(!removed(*fs.connector, 1));
  fs.mend();
  fs.check_usage();
  CHECK(stored(*fs.connector, {3}));
  fs.check_usage();
}

TEST(a_record_whose_access_time_cannot_be_set_is_loaded) {
  Fs fs;
  CHECK(stored(*fs.connector, {1}));
  fs.connector->close();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(fs.base)) {
    std::unique_ptr<File> file;
    if (entry.path().extension() != ".kvc") continue;
    CHECK_OK(posix_files().open(entry.path(), FileMode::kRead, false, &file));
    CHECK_OK(file->set_access_time(1'000'000'000));
    std::filesystem::last_write_time(entry.path(), std::filesystem::file_time_type::min());
  }
  fs.connector = std::make_unique<FsConnector>(fs_options(fs.base), fs.files);
  std::atomic<int> tried = 0;
  fs.files.before = [&](const std::string& call, const std::string&) {
    tried += call == "access_time";
    return call == "access_time" ? error(EROFS) : Status();
  };
  CHECK_EQ(fs.connector->open({}), std::string());
  CHECK(load_one(*fs.connector, 1) == LoadStatus::kLoaded);
  CHECK_EQ(tried.load(), 1);
}

TEST(a_read_that_fails_leaves_the_record_there) {
  Fs fs;
  CHECK(stored(*fs.connector, {1}));
  fs.fail("read", EIO);
  std::string reason;
  CHECK(load_one(*fs.connector, 1, &reason) == LoadStatus::kFailed);
  CHECK_EQ(reason, std::string("io"));
  fs.mend();
  CHECK(load_one(*fs.connector, 1) == LoadStatus::kLoaded);
}

TEST(without_direct_files_it_says_so_once_and_works) {
  HookedFiles files;
  files.buffered_only = true;
  const TestFolder folder;
  FsConnector connector(fs_options(folder.path), files);
  CHECK_EQ(connector.open({}), std::string());
  CHECK(stored(connector, {1, 2, 3}));
  CHECK(load_one(connector, 2) == LoadStatus::kLoaded);
  std::vector<ConnectorNote> notes;
  connector.take_notes(&notes);
  CHECK_EQ(std::ranges::count_if(notes, [](const ConnectorNote& note) { return note.warning; }), 1);
}

TEST(directories_of_a_batch_are_synced_once_each) {
  Fs fs;
  std::vector<int> numbers;
  std::set<std::string> folders;
  const FsPaths paths(fs.base, "tmp");
  for (int number = 0; number < 20; ++number) {
    numbers.push_back(number);
    folders.insert(paths.folder(numbered_key(number)));
  }
  CHECK(stored(*fs.connector, numbers));
  CHECK_EQ(fs.connector->clear(), 20U);
  std::mutex mutex;
  std::vector<std::string> synced;
  fs.files.before = [&](const std::string& call, const std::string& path) {
    const std::lock_guard lock(mutex);
    if (call == "sync_folder") synced.push_back(path);
    return Status();
  };
  CHECK(stored(*fs.connector, numbers));
  std::ranges::sort(synced);
  CHECK(synced == std::vector<std::string>(folders.begin(), folders.end()));
}

TEST(a_record_is_older_than_what_it_continues_however_its_chain_is_used) {
  FsIndex index;
  const auto add = [&](int number, int parent) {
    FsRecord& record = index.add(numbered_key(number), 1, 0);
    if (parent != 0) record.parent = numbered_key(parent);
    index.used(record);
  };
  // A chain of 1,000, then others; every so often somewhere in the chain is used.
  for (int number = 1; number <= 1'000; ++number)
    add(number, number - 1);
  for (int number = 2'000; number < 6'000; ++number) {
    add(number, 0);
    if (number % 7 == 0) index.used(*index.find(numbered_key(1 + number * 31 % 1'000)));
  }
  std::vector<int> places(1'001);
  int place = 0;
  for (const Digest& at : index.ages()) {
    const int number = number_of(at);
    place += 1;
    if (number <= 1'000) places[static_cast<std::size_t>(number)] = place;
  }
  CHECK_EQ(place, 5'000);
  for (std::size_t number = 2; number <= 1'000; ++number)
    CHECK(places[number] < places[number - 1]);
  CHECK(places[1] > 4'000);  // its last use was not long ago
  // Parents that form a circle end the walk.
  index.find(numbered_key(1))->parent = numbered_key(1'000);
  for (const int number : {1, 500, 1'000})
    index.used(*index.find(numbered_key(number)));
  CHECK_EQ(index.ages().size(), 5'000U);
}

TEST(a_record_being_loaded_is_not_evicted) {
  Fs fs(2 * kCharge);
  CHECK(stored(*fs.connector, {1}));
  CHECK(stored(*fs.connector, {2}));
  Gate gate(fs.files, "read");
  auto load = std::async(std::launch::async, [&] { return load_one(*fs.connector, 1); });
  gate.until_reached();
  CHECK(stored(*fs.connector, {3}));
  CHECK(exists(*fs.connector, 1));
  CHECK(!exists(*fs.connector, 2));
  gate.open();
  CHECK(load.get() == LoadStatus::kLoaded);
}

TEST(a_delete_does_not_wait_for_the_put_of_its_key_and_wins) {
  Fs fs;
  Gate gate(fs.files, "write");
  auto put = std::async(std::launch::async, [&] { return stored(*fs.connector, {1}); });
  gate.until_reached();
  CHECK(removed(*fs.connector, 1));
  gate.open();
  CHECK(put.get());
  CHECK(!exists(*fs.connector, 1));
  fs.check_usage();
  CHECK(stored(*fs.connector, {1}));
}

TEST(a_delete_waits_while_the_name_appears_and_takes_it) {
  Fs fs;
  Gate gate(fs.files, "sync_folder");
  auto put = std::async(std::launch::async, [&] { return stored(*fs.connector, {1}); });
  gate.until_reached();
  auto removal = std::async(std::launch::async, [&] { return removed(*fs.connector, 1); });
  CHECK(!exists(*fs.connector, 1));
  gate.open();
  CHECK(put.get());
  CHECK(removal.get());
  fs.check_usage();
  CHECK_EQ(on_disk(fs.base).records, 0U);
}

TEST(a_heal_is_not_unlinked_by_the_removal_of_what_it_heals) {
  Fs fs;
  CHECK(stored(*fs.connector, {1}));
  Gate gate(fs.files, "unlink", ".kvc");
  auto removal = std::async(std::launch::async, [&] { return removed(*fs.connector, 1); });
  gate.until_reached();
  std::vector<Record> records = records_of({1});
  std::vector<PutItem> items = put_items(records);
  fs.connector->put(items);  // written beside the removal; the name has to wait for it
  auto end = std::async(std::launch::async, [&] { fs.connector->put_end(items); });
  CHECK(!exists(*fs.connector, 1));
  gate.open();
  end.get();
  CHECK(removal.get());
  CHECK(items[0].status == PutStatus::kStored);
  CHECK(load_one(*fs.connector, 1) == LoadStatus::kLoaded);
  fs.check_usage();
}

TEST(a_late_report_about_a_corrupt_copy_does_not_touch_the_one_put_since) {
  Fs fs;
  CHECK(stored(*fs.connector, {1}));
  const Record room(-1);
  LoadItem item = load_item(1, room);
  fs.connector->load(std::span(&item, 1));
  CHECK(item.status == LoadStatus::kLoaded);
  CHECK(removed(*fs.connector, 1));
  CHECK(stored(*fs.connector, {1}));
  fs.connector->remove_corrupt(item);
  CHECK(exists(*fs.connector, 1));
  fs.connector->load(std::span(&item, 1));
  fs.connector->remove_corrupt(item);
  CHECK(!exists(*fs.connector, 1));
}

TEST(batches_that_put_each_others_keys_end_in_one_thread) {
  Fs fs;
  std::vector<Record> one = records_of({1, 2});
  std::vector<Record> two = records_of({2, 1});
  std::vector<PutItem> a = put_items(one);
  std::vector<PutItem> b = put_items(two);
  std::atomic<int> writes = 0;
  fs.files.after = [&](const std::string& call, const std::string&) { writes += call == "create"; };
  fs.connector->put(std::span(a).first(1));
  fs.connector->put(std::span(b).first(1));
  fs.connector->put(std::span(b).last(1));
  fs.connector->put(std::span(a).last(1));
  fs.connector->put_end(b);
  fs.connector->put_end(a);
  CHECK(a[0].status == PutStatus::kStored && a[1].status == PutStatus::kExists);
  CHECK(b[0].status == PutStatus::kStored && b[1].status == PutStatus::kExists);
  CHECK_EQ(writes.load(), 2);
  fs.check_usage();
}

TEST(whoever_put_the_same_key_learns_that_its_write_failed) {
  Fs fs;
  Gate gate(fs.files, "write");
  auto first = std::async(std::launch::async,
                          [&] { return put_all(*fs.connector, records_of({1}))[0].status; });
  gate.until_reached();
  std::vector<Record> records = records_of({1});
  std::vector<PutItem> items = put_items(records);
  fs.connector->put(items);
  std::filesystem::remove_all(fs.base + "/tmp");  // the write goes on in a file without a name
  gate.open();
  fs.connector->put_end(items);
  CHECK(first.get() == PutStatus::kFailed);
  CHECK(items[0].status == PutStatus::kFailed);
  CHECK(stored(*fs.connector, {1}));
}

TEST(while_names_are_read_it_is_not_ready_and_closing_does_not_wait_for_them) {
  Fs fs;
  CHECK(stored(*fs.connector, {1, 2, 3}));
  fs.connector->close();
  fs.connector = std::make_unique<FsConnector>(fs_options(fs.base), fs.files);
  {
    Gate gate(fs.files, "list");
    CHECK_EQ(fs.connector->open({}), std::string());
    gate.until_reached();
    CHECK(!fs.connector->ready());
    auto there = std::async(std::launch::async, [&] { return exists(*fs.connector, 1); });
    gate.open();
    CHECK(there.get());
    CHECK(fs.connector->ready());
    fs.mend();
  }
  fs.connector = std::make_unique<FsConnector>(fs_options(fs.base), fs.files);
  CHECK_EQ(fs.connector->open({}), std::string());
  fs.connector->close();
}

TEST(a_directory_that_cannot_be_read_answers_everything_with_io) {
  Fs fs;
  CHECK(stored(*fs.connector, {1}));
  fs.connector = std::make_unique<FsConnector>(fs_options(fs.base), fs.files);
  fs.fail("list", EIO);
  CHECK_EQ(fs.connector->open({}), std::string());
  ExistsItem item{.key = numbered_key(1)};
  fs.connector->exists(std::span(&item, 1));
  CHECK(item.presence == Presence::kUnknown);
  CHECK(put_all(*fs.connector, records_of({2}))[0].status == PutStatus::kFailed);
  CHECK(load_one(*fs.connector, 1) == LoadStatus::kFailed);
  CHECK(!removed(*fs.connector, 1));
}

TEST(whatever_threads_do_at_once_usage_is_what_lies_there_and_the_cap_holds) {
  for (const std::uint64_t cap : {std::uint64_t{0}, 8 * kCharge}) {
    Fs fs(cap);
    std::atomic<bool> wrong{false};
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 draw(seed);
        for (int round = 0; round < 60; ++round) {
          const int number = static_cast<int>(draw() % 12);
          switch (draw() % 5) {
            case 0:
            case 1: {
              std::vector<int> numbers;
              for (int i = 0; i < 4; ++i)
                numbers.push_back(static_cast<int>(draw() % 12));
              for (const PutItem& item : put_all(*fs.connector, records_of(numbers))) {
                if (item.status != PutStatus::kStored && item.status != PutStatus::kExists)
                  wrong = true;
              }
              break;
            }
            case 2:
              removed(*fs.connector, number);
              break;
            case 3: {
              const LoadStatus status = load_one(*fs.connector, number);
              if (status != LoadStatus::kLoaded && status != LoadStatus::kAbsent) wrong = true;
              break;
            }
            default:
              if (draw() % 8 == 0) fs.connector->clear();
              exists(*fs.connector, number);
              if (cap != 0 && fs.connector->usage().used_bytes > cap) wrong = true;
          }
        }
      });
    }
    for (std::thread& thread : threads)
      thread.join();
    CHECK(!wrong);
    fs.check_usage();
  }
}
