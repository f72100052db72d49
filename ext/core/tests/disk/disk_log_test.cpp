// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/log.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "support/check.h"
#include "support/disk_log_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

TEST(the_oldest_records_leave_when_the_log_is_full_and_are_reported) {
  Disk disk;
  disk.open();
  std::vector<Digest> evicted;
  for (int key = 1; key < 1000; key += 5) {
    disk.put(key, key + 5);
    disk.log->take_evicted(&evicted);
    const ConnectorUsage usage = disk.log->usage();
    CHECK(usage.used_bytes <= usage.capacity_bytes);
    CHECK(disk.bytes_on_medium() <= usage.capacity_bytes);
    CHECK_EQ(usage.records + evicted.size(), static_cast<std::uint64_t>(key + 4));
  }
  CHECK(!evicted.empty());
  for (int key = 1; key < 1000; ++key) {
    const bool gone = std::count(evicted.begin(), evicted.end(), numbered_key(key)) == 1;
    CHECK(disk.load(key) == (gone ? LoadStatus::kAbsent : LoadStatus::kLoaded));
  }
  CHECK(disk.present(999));
  CHECK(!disk.present(1));
  const std::uint64_t records = disk.log->usage().records;
  disk.reopen();
  CHECK_EQ(disk.log->usage().records, records);
}

TEST(what_is_loaded_often_stays_when_its_segment_retires) {
  Disk disk;
  disk.open();
  disk.put(1, 10);
  for (int key = 10; key < 1000; key += 5) {
    CHECK(disk.load(4) == LoadStatus::kLoaded);
    disk.put(key, key + 5);
  }
  CHECK(disk.present(4) && !disk.present(3));
  CHECK(disk.count("reinserted_records") > 0);
  disk.reopen();
  CHECK(disk.load(4) == LoadStatus::kLoaded);
}

TEST(what_is_continued_stays_when_its_segment_retires_and_so_does_what_it_continues) {
  Disk disk;
  disk.open();
  disk.put(1, 4);
  disk.put(std::vector{4}, 2);
  for (int key = 10; key < 1000; key += 5) {
    CHECK(disk.put(std::vector{key}, 4).front() == PutStatus::kStored);
    disk.put(key + 1, key + 5);
  }
  CHECK(disk.present(2) && disk.present(4) && !disk.present(1) && !disk.present(3));
}

TEST(what_is_loaded_often_stays_though_what_it_continues_is_elsewhere) {
  Disk disk;
  disk.open();
  disk.put(std::vector{4}, 777);  // in L1, or a window or state that needs nothing before it
  for (int key = 10; key < 1000; key += 5) {
    CHECK(disk.load(4) == LoadStatus::kLoaded);
    disk.put(key, key + 5);
  }
  CHECK(disk.present(4));
}

TEST(a_removed_record_does_not_come_back_when_tombstones_are_overwritten) {
  Disk disk;
  disk.open();
  disk.put(1, 20);
  disk.remove({1, 2, 3});
  for (int key = 20; key < 1500; key += 5) {
    disk.put(key, key + 5);
    if (key % 100 == 0) {
      disk.reopen();
      CHECK(!disk.present(1) && !disk.present(2) && !disk.present(3));
    }
  }
}

TEST(a_record_that_is_too_long_is_refused_and_nothing_else) {
  Disk disk;
  disk.open();
  std::vector<Record> records = records_of({7, 8});
  records[0] = Record(7, disk.log->max_record_bytes() + 1);
  const std::vector<PutItem> items = put_all(*disk.log, records);
  CHECK(items[0].status == PutStatus::kFailed && std::string(items[0].reason) == "too_large");
  CHECK(items[1].status == PutStatus::kStored);
  const Record fits(9, disk.log->max_record_bytes());
  CHECK(put_one(*disk.log, fits) == PutStatus::kStored);
  CHECK(disk.load(9, fits.length) == LoadStatus::kLoaded);
}

// A put that was cut short behind the frame's header leaves in place what lies there from an
// earlier generation: a sound record of the same key.
TEST(a_frame_does_not_count_with_an_earlier_record_of_its_key_behind_it) {
  Record earlier(1);
  earlier.bytes[kHeaderBytes] ^= 1;
  const std::uint32_t lengths[] = {earlier.length - kHeaderBytes};
  const RecordSpec spec{.key = earlier.key};
  CHECK_OK(seal_record(earlier.bytes, earlier.length, spec, lengths, 1));

  Disk disk;
  disk.open();
  disk.put({1});
  const std::string path = disk.options.folder + "/00000000.seg";
  std::string found = read_file(path);  // closing would mark the frame as synced
  disk.log.reset();
  write_file(path, found);
  disk.open();
  CHECK(disk.load(1) == LoadStatus::kLoaded);
  disk.log.reset();
  std::memcpy(found.data() + kSegmentHeaderBytes + kFrameHeaderBytes, earlier.bytes,
              earlier.length);
  write_file(path, found);
  disk.open();
  CHECK(!disk.present(1));
}

TEST(garbage_is_left_alone_and_costs_nothing_but_itself) {
  Disk disk;
  disk.open();
  disk.put(1, 60);
  disk.log.reset();
  const std::string garbage(5000, 'x');
  write_file(disk.options.folder + "/0000002a.seg", garbage);
  write_file(disk.options.folder + "/notes.txt", garbage);
  disk.open();
  CHECK_EQ(disk.count("unreadable_segments"), 1u);
  for (int key = 1; key < 60; ++key)
    CHECK(disk.load(key) == LoadStatus::kLoaded);
  CHECK(read_file(disk.options.folder + "/0000002a.seg") == garbage);
}

TEST(removing_a_bad_copy_spares_the_one_that_healed_it) {
  Disk disk;
  disk.open();
  disk.put({1});
  const Record room(-1);
  LoadItem item = load_item(1, room);
  disk.log->load(std::span(&item, 1));
  disk.remove({1});
  disk.put({1});
  disk.log->remove_corrupt(item);
  CHECK(disk.present(1));
  disk.log->load(std::span(&item, 1));
  disk.log->remove_corrupt(item);
  CHECK(!disk.present(1));
}

TEST(a_smaller_capacity_drops_the_oldest_and_a_larger_one_keeps_all) {
  Disk disk;
  disk.open();
  disk.put(1, 200);
  const std::uint64_t records = disk.log->usage().records;
  disk.log.reset();
  disk.options.capacity_bytes *= 2;
  disk.open();
  CHECK_EQ(disk.log->usage().records, records);
  disk.put(200, 400);
  disk.log.reset();
  disk.options.capacity_bytes /= 4;
  disk.options.segment_bytes = 0;
  disk.open();
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  CHECK(disk.log->usage().records > 0);
  disk.put(400, 600);
  CHECK(disk.bytes_on_medium() <= disk.options.capacity_bytes);
  CHECK(disk.present(599));
  disk.reopen();
  CHECK(disk.load(599) == LoadStatus::kLoaded);
}

TEST(many_threads_put_load_and_remove_at_once) {
  Disk disk;
  disk.options.own_threads = true;
  disk.open();
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&disk, &wrong, thread] {
      for (int round = 0; round < 40; ++round) {
        // Half of the keys are the threads' own, half are everybody's.
        const int base = round % 2 == 0 ? 1000 * (thread + 1) + 10 * round : 10 * round;
        std::vector<Record> records;
        for (int key = base; key < base + 8; ++key)
          records.emplace_back(key);
        std::vector<PutItem> items = put_items(records);
        disk.log->put(std::span(items).first(3));
        disk.log->put(std::span(items).subspan(3));
        disk.log->put_end(items);
        for (const PutItem& item : items)
          wrong[thread] += item.status == PutStatus::kFailed;
        for (int key = base; key < base + 8; ++key) {
          const LoadStatus status = disk.load(key);
          wrong[thread] += status == LoadStatus::kCorrupt || status == LoadStatus::kFailed;
        }
        if (round % 7 == 0) removed(*disk.log, base);
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  CHECK_EQ(wrong[0] + wrong[1] + wrong[2] + wrong[3], 0);
  disk.log->close();  // until then its own thread may drop a segment
  const ConnectorUsage before = disk.log->usage();
  disk.options.own_threads = false;
  disk.reopen();
  CHECK_EQ(disk.log->usage().records, before.records);
  CHECK_EQ(disk.log->usage().used_bytes, before.used_bytes);
}

}  // namespace
