// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The disk log on a medium whose calls fail, or are held up.
#include "disk/log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "support/check.h"
#include "support/disk_log_fixture.h"
#include "support/hooked_files.h"
#include "support/volatile_files.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// An open log whose calls of the file layer a test can hook.
struct HookedDisk : Disk {
  HookedDisk() {
    files = &hooked;
    open();
  }
  ~HookedDisk() { log.reset(); }
  HookedFiles hooked;
};

TEST(puts_that_find_no_room_use_up_no_segment_numbers) {
  HookedDisk disk;
  HookedFiles& files = disk.hooked;
  files.fail_all("allocate", ENOSPC);
  for (int key = 1; key < 20; ++key)
    CHECK(disk.put({key}) == std::vector({PutStatus::kThrottled}));
  files.heal("allocate");
  disk.put(1, 5);
  CHECK(!read_file(disk.options.folder + "/00000000.seg").empty());
  // Numbers of files that belong to somebody else are left out.
  disk.log.reset();
  const std::string foreign = disk.options.folder + "/00000002.seg";
  CHECK_OK(posix_files().make_folder(foreign));
  write_file(disk.options.folder + "/00000003.seg", std::string(5000, 'x'));
  disk.open();
  write_file(disk.options.folder + "/00000001.seg", std::string(5000, 'x'));
  for (int key = 5; key < 60; ++key)
    CHECK(disk.put({key}) == std::vector({PutStatus::kStored}));
  CHECK(!read_file(disk.options.folder + "/00000004.seg").empty());
}

// What is not marked as synced is read whole at open. One failed read must not pass for the end of
// the log.
TEST(a_log_that_cannot_be_read_is_refused_and_nothing_in_it_changes) {
  HookedDisk disk;
  HookedFiles& files = disk.hooked;
  disk.put({1});  // and a free segment is made, whose header says that it is synced
  disk.put(2, 8);
  const std::string path = disk.options.folder + "/00000000.seg";
  const std::string bytes = read_file(path);  // closing would mark the records as synced
  disk.log.reset();
  write_file(path, bytes);
  unsigned reads = 0;
  unsigned fail_from = 0;
  unsigned fail_up_to = 0;
  files.before = [&](const std::string& call, const std::string&) {
    if (call != "read" || ++reads < fail_from || reads > fail_up_to) return Status();
    return Status(StatusCode::kOsError, "injected", EIO);
  };
  unsigned refused = 0;
  for (fail_from = 1, fail_up_to = ~0U;; ++fail_from, reads = 0) {
    const std::string wrong = disk.try_open();
    if (wrong.empty()) break;
    ++refused;
    CHECK(wrong.find(".seg: Input/output error") != std::string::npos);
    CHECK(wrong.find("repair") != std::string::npos);
    disk.log.reset();
    CHECK(read_file(path) == bytes);
  }
  CHECK(refused > 12);  // headers and records
  disk.log.reset();
  write_file(path, bytes);
  // One that goes away is tried again.
  for (fail_from = 1; fail_from <= refused; ++fail_from) {
    reads = 0;
    fail_up_to = fail_from + 1;
    disk.open();
    fail_up_to = 0;
    for (int key = 1; key < 8; ++key)
      CHECK(disk.load(key) == LoadStatus::kLoaded);
    disk.log.reset();
    write_file(path, bytes);
  }
}

// -- what fails, and stays so until the log is opened again

TEST(a_failed_write_makes_the_log_read_only_until_it_is_opened_again) {
  HookedDisk disk;
  HookedFiles& files = disk.hooked;
  disk.put(1, 10);
  files.fail_all("write", ENOSPC);
  CHECK(disk.put({10}) == std::vector({PutStatus::kThrottled}));
  files.heal("write");
  CHECK(disk.put({11}) == std::vector({PutStatus::kFailed}));
  CHECK_EQ(disk.count("read_only"), 1u);
  for (int key = 1; key < 12; ++key)
    CHECK(disk.load(key) == (key < 10 ? LoadStatus::kLoaded : LoadStatus::kAbsent));
  disk.reopen();
  disk.put(10, 20);
  disk.remove({3});
  disk.reopen();
  for (int key = 1; key < 20; ++key)
    CHECK(disk.load(key) == (key == 3 ? LoadStatus::kAbsent : LoadStatus::kLoaded));
}

// What others wrote behind the frame that could not be written is not acknowledged either.
TEST(puts_behind_a_frame_that_could_not_be_written_fail_and_do_not_wait) {
  HookedDisk disk;
  HookedFiles& files = disk.hooked;
  disk.put(1, 10);
  const Record other(11);
  PutItem item = put_item(other);
  unsigned writes = 0;
  files.before = [&](const std::string& call, const std::string&) {
    if (call != "write" || ++writes > 1) return Status();
    disk.log->put(std::span(&item, 1));  // behind this one
    return Status(StatusCode::kOsError, "injected", EIO);
  };
  CHECK(disk.put({10}) == std::vector({PutStatus::kFailed}));
  disk.log->put_end(std::span(&item, 1));
  CHECK(item.status == PutStatus::kFailed);
  CHECK(!disk.present(10) && !disk.present(11));
  disk.reopen();
  disk.put({10, 11});
  for (int key = 1; key < 12; ++key)
    CHECK(disk.load(key) == LoadStatus::kLoaded);
}

TEST(a_file_that_cannot_be_removed_makes_the_log_read_only_and_counts) {
  HookedDisk disk;
  HookedFiles& files = disk.hooked;
  disk.put(1, 400);
  disk.log.reset();
  disk.options.segment_bytes = 64 * 1024;  // what is there goes, it is not used again
  disk.open();
  files.fail_all("unlink", EACCES);
  int key = 400;
  while (disk.put({key}) == std::vector({PutStatus::kStored}))
    ++key;
  CHECK_EQ(disk.count("read_only"), 1u);
  CHECK(disk.count("segments_bytes") == disk.bytes_on_medium());
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  files.heal("unlink");
  disk.reopen();
  disk.put(key, key + 200);
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  CHECK(disk.load(key + 199) == LoadStatus::kLoaded);
}

TEST(what_is_left_of_a_segment_that_could_not_be_made_counts) {
  HookedDisk disk;
  HookedFiles& files = disk.hooked;
  files.fail_all("unlink", EACCES);
  files.fail_all("sync_folder", EIO);
  for (int key = 1; key < 100; ++key) {
    CHECK(disk.put({key}) != std::vector({PutStatus::kStored}));
    CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  }
  files.heal("unlink");
  files.heal("sync_folder");
  disk.reopen();
  disk.put(1, 400);
  CHECK(disk.count("segments_bytes") == disk.bytes_on_medium());
}

// A put that is begun and not ended: its frame is written, and not synced.
void begin_put(DiskLog* log, const Record& record) {
  PutItem item = put_item(record);
  log->put(std::span(&item, 1));
}

// After the length of segments has changed, a retiring segment's file goes. Before that, the record
// that stays is synced with the lock let go of, and another put may fill the active segment.
TEST(a_put_may_fill_the_active_segment_while_a_file_goes) {
  HookedDisk disk;
  HookedFiles& files = disk.hooked;
  disk.put(1, 400);
  disk.log.reset();
  disk.options.segment_bytes = 64 * 1024;
  disk.open();
  bool armed = false;
  bool retiring = false;  // from the read of the record that is to stay
  bool filled = false;
  bool gone = false;
  const Record large(1000, disk.log->max_record_bytes());
  files.before = [&](const std::string& call, const std::string&) {
    if (!armed || gone) return Status();
    retiring = retiring || call == "read";
    gone = call == "unlink";
    if (retiring && !filled && call == "sync") {
      filled = true;
      begin_put(disk.log.get(), large);
    }
    return Status();
  };
  for (int key = 400; key < 500 && !gone; ++key) {
    for (int hot = 1; hot < 400; ++hot) {
      if (disk.present(hot)) CHECK(disk.load(hot) == LoadStatus::kLoaded);
    }
    armed = true;
    disk.put({key});
    armed = false;
  }
  CHECK(gone && filled);
  disk.open();
  for (int key = 1; key < 400; ++key)
    CHECK(!disk.present(key) || disk.load(key) == LoadStatus::kLoaded);
}

}  // namespace
