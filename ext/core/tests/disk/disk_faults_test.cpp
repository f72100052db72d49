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

TEST(puts_that_find_no_room_use_up_no_segment_numbers) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
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
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
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

// -- what fails and works again later

TEST(capacity_comes_back_when_a_file_that_could_not_be_removed_goes) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
  disk.put(1, 400);
  disk.log.reset();
  disk.options.segment_bytes = 64 * 1024;  // what is there goes, it is not used again
  disk.open();
  const std::uint64_t records = disk.log->usage().records;
  files.fail_all("unlink", EACCES);
  int key = 400;
  while (disk.put({key}) == std::vector({PutStatus::kStored}))
    ++key;
  for (int other = 1000; other < 1200; ++other)
    CHECK(disk.put({other}) == std::vector({PutStatus::kFailed}));
  CHECK(disk.log->usage().records > records / 2);  // not one segment a put
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  files.heal("unlink");
  disk.put(key, key + 200);
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  CHECK(disk.count("segments_bytes") == disk.bytes_on_medium());
  disk.reopen();
  CHECK(disk.load(key + 199) == LoadStatus::kLoaded);
}

TEST(a_log_whose_file_cannot_be_removed_opens_and_shrinks_later) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
  disk.put(1, 400);
  disk.log.reset();
  disk.options.capacity_bytes /= 2;
  files.fail_all("unlink", EACCES);
  disk.open();
  CHECK(disk.present(399));
  files.heal("unlink");
  for (int key = 400; key < 600; ++key)
    (void)disk.put({key});
  CHECK(disk.present(599));
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
}

TEST(what_is_left_of_a_segment_that_could_not_be_made_counts_until_it_goes) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
  files.fail_all("unlink", EACCES);
  files.fail_all("sync_folder", EIO);
  for (int key = 1; key < 100; ++key) {
    CHECK(disk.put({key}) == std::vector({PutStatus::kFailed}));
    CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  }
  files.heal("unlink");
  files.heal("sync_folder");
  disk.put(1, 400);
  CHECK(disk.count("segments_bytes") == disk.bytes_on_medium());
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
}

// A medium that cannot reserve space: the write of a frame fails, and so does that of the frame
// that is skipped.
TEST(a_medium_that_was_full_takes_puts_again) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
  disk.put(1, 10);
  files.fail_all("write", ENOSPC);
  for (int key = 10; key < 20; ++key)
    CHECK(disk.put({key}) == std::vector({PutStatus::kThrottled}));
  for (int key = 1; key < 20; ++key)
    CHECK(disk.load(key) == (key < 10 ? LoadStatus::kLoaded : LoadStatus::kAbsent));
  CHECK_EQ(disk.count("read_only"), 0u);
  files.heal("write");
  disk.put(10, 20);
  disk.remove({3});
  disk.reopen();
  for (int key = 1; key < 20; ++key)
    CHECK(disk.load(key) == (key == 3 ? LoadStatus::kAbsent : LoadStatus::kLoaded));
}

// What others wrote behind the frame that could not be written is not acknowledged either.
TEST(puts_behind_a_frame_that_could_not_be_written_are_told_so_and_do_not_wait) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
  disk.put(1, 10);
  bool full = true;
  const Extent other(11);
  PutItem item{.key = Disk::key_of(11), .bytes = other.bytes, .length = other.length, .hold = {}};
  unsigned writes = 0;
  files.before = [&](const std::string& call, const std::string&) {
    if (call != "write" || !full) return Status();
    const unsigned write = ++writes;
    if (write == 1) disk.log->put(std::span(&item, 1));  // behind this one
    return write == 2 ? Status() : Status(StatusCode::kOsError, "injected", ENOSPC);
  };
  CHECK(disk.put({10}) == std::vector({PutStatus::kThrottled}));
  disk.log->put_end(std::span(&item, 1));
  CHECK(item.status == PutStatus::kThrottled && std::string(item.reason) == "disk_full");
  CHECK(!disk.present(10) && !disk.present(11));
  full = false;
  disk.put(10, 15);
  disk.reopen();
  for (int key = 1; key < 15; ++key)
    CHECK(disk.load(key) == LoadStatus::kLoaded);
}

// The record that stays is read and gets its place in two steps. Between them, frames that could
// not be written are written again, with the lock let go of.
TEST(a_record_that_is_deleted_while_its_segment_retires_stays_deleted) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
  const Extent other(9000);
  PutItem item{.key = Disk::key_of(9000), .bytes = other.bytes, .length = other.length, .hold = {}};
  enum class Step : std::uint8_t { kFill, kRetire, kFail, kWriteAgain, kDone } step = Step::kFill;
  unsigned failed = 0;
  DeleteItem gone{.key = Disk::key_of(4)};
  std::thread remover;
  files.before = [&](const std::string& call, const std::string&) {
    if (call == "read" && step == Step::kRetire) {
      step = Step::kFail;
      disk.log->put(std::span(&item, 1));
      step = failed == 2 ? Step::kWriteAgain : Step::kFill;
    } else if (call == "write" && step == Step::kFail) {
      ++failed;  // the frame, and the one that is skipped
      return Status(StatusCode::kOsError, "injected", ENOSPC);
    } else if (call == "write" && step == Step::kWriteAgain) {
      step = Step::kDone;
      remover = std::thread([&] { disk.log->remove(std::span(&gone, 1)); });
      while (disk.present(4))
        std::this_thread::yield();
    }
    return Status();
  };
  disk.put(1, 10);
  for (int key = 10; key < 1000 && step != Step::kDone; key += 5) {
    step = Step::kFill;
    CHECK(disk.load(4) == LoadStatus::kLoaded);
    step = Step::kRetire;
    disk.put(key, key + 5);
  }
  CHECK(step == Step::kDone);
  remover.join();
  CHECK(gone.removed && !disk.present(4));
  disk.reopen();
  CHECK(!disk.present(4));
}

// A put that is begun and not ended: its frame is written, and not synced.
void begin_put(DiskLog* log, const Extent& record, int number) {
  PutItem item{
      .key = Disk::key_of(number), .bytes = record.bytes, .length = record.length, .hold = {}};
  log->put(std::span(&item, 1));
}

// After the length of segments has changed, a retiring segment's file goes. Before that, the record
// that stays is synced with the lock let go of, and another put may fill the active segment.
TEST(a_put_may_fill_the_active_segment_while_a_file_goes) {
  HookedFiles files;
  Disk disk;
  disk.files = &files;
  disk.open();
  disk.put(1, 400);
  disk.log.reset();
  disk.options.segment_bytes = 64 * 1024;
  disk.open();
  bool armed = false;
  bool retiring = false;  // from the read of the record that is to stay
  bool filled = false;
  bool gone = false;
  const Extent large(1000, disk.log->max_record_bytes());
  files.before = [&](const std::string& call, const std::string&) {
    if (!armed || gone) return Status();
    retiring = retiring || call == "read";
    gone = call == "unlink";
    if (retiring && !filled && call == "sync") {
      filled = true;
      begin_put(disk.log.get(), large, 1000);
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

// Nothing is known about what was written before a sync that failed.
TEST(no_record_is_lost_whichever_sync_fails_while_files_go) {
  // However full the newest segment is.
  for (int stored = 140; stored < 160; ++stored) {
    bool failed = true;
    for (unsigned fails_at = 1; failed; ++fails_at) {
      VolatileFiles medium;
      CHECK_OK(medium.make_folder("/medium"));
      HookedFiles files(medium);
      Disk disk;
      disk.files = &files;
      disk.options.folder = "/medium/log";
      disk.open();
      disk.put(0, stored);
      std::vector<int> there;
      for (int key = 0; key < stored; ++key) {
        if (disk.present(key)) there.push_back(key);
      }
      disk.log.reset();
      // The capacity is halved, so opening takes segments out of the log. A segment without a frame
      // cannot be removed, so opening succeeds although it could not do so.
      const std::uint64_t capacity_bytes =
          std::exchange(disk.options.capacity_bytes, 8 * 128 * 1024);
      std::unique_ptr<File> empty;
      CHECK_OK(medium.open("/medium/log/000000ff.seg", FileMode::kCreate, true, &empty));
      empty.reset();
      unsigned syncs = 0;
      files.before = [&](const std::string& call, const std::string&) {
        if (call == "unlink") return Status(StatusCode::kOsError, "unlink", EACCES);
        if (call != "sync" || ++syncs != fails_at) return Status();
        return Status(StatusCode::kOsError, "fdatasync", EIO);
      };
      const bool opened = disk.try_open().empty();
      failed = syncs >= fails_at;
      CHECK(opened != failed);
      files.before = [](const std::string&, const std::string&) { return Status(); };
      if (opened) there.clear();
      for (int key = stored; opened && key < stored + 10; ++key)
        (void)disk.put({key});
      for (int key = 0; opened && key < stored + 10; ++key) {
        if (disk.present(key)) there.push_back(key);
      }
      disk.options.capacity_bytes = capacity_bytes;  // the next open evicts nothing
      disk.open();
      for (const int key : there)
        CHECK(disk.load(key) == LoadStatus::kLoaded);
      disk.log.reset();
    }
  }
}

}  // namespace
