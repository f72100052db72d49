#include <fcntl.h>

#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

TEST(rows_run_out_with_an_error) {
  Fixture f;
  for (std::uint32_t i = 1; i < kRowCount; ++i) {
    std::uint8_t id[16] = {static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(i >> 8), 1};
    std::uint32_t row = 0;
    CHECK_OK(f.pool->claim_row(id, id, i, false, &row));
    CHECK_EQ(row, i);
  }
  std::uint8_t id[16] = {0, 0, 2};
  std::uint32_t row = 0;
  CHECK_EQ(f.pool->claim_row(id, id, 1, false, &row).code(), StatusCode::kNoSpace);
  std::uint8_t known[16] = {5, 0, 1};
  CHECK_OK(f.pool->claim_row(known, known, 99, false, &row));
  CHECK_EQ(row, 5);
}

TEST(rows_that_share_a_bit_are_told_apart_until_a_restart_which_waits_for_both) {
  Fixture f;
  std::uint32_t row = 0;
  for (std::uint32_t i = 1; i < kRowCount; ++i) {
    std::uint8_t id[16] = {static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(i >> 8), 1};
    CHECK_OK(f.pool->claim_row(id, id, i, false, &row));
  }
  CHECK_EQ(copy(f.pool->stats().rows_claimed), copy(f.pool->stats().rows_capacity));
  const std::uint32_t near = 5, far = 5 + kRowBits, last = kRowCount - 1;
  const auto leased = chain(1, 3), reserved = chain(2, 2);
  f.store(leased);
  const auto both = f.lease(leased, {far, last});
  CHECK(!f.pool->release(both.ticket, near));
  CHECK(f.pool->release(both.ticket, far));
  CHECK(!f.pool->release(both.ticket, far));
  CHECK(f.pool->release(both.ticket, last));
  CHECK_EQ(copy(f.pool->stats().leased_bytes), 0);
  CHECK_OK(validate(*f.pool));
  f.lease(leased, {far});
  f.reserve(reserved, last);
  CHECK_OK(f.pool->row_gone(last - 1));
  f.adopt();
  CHECK_EQ(copy(f.pool->stats().rows_claimed), kRowCount - 2);
  CHECK_EQ(f.count(EntryState::kQuarantined), 2);
  CHECK_OK(f.pool->row_gone(last));
  for (std::uint32_t other = last % kRowBits; other < last; other += kRowBits)
    CHECK_OK(f.pool->row_quiesced(other));
  CHECK_EQ(f.count(EntryState::kQuarantined), 0);
  CHECK_OK(f.pool->row_gone(far));
  CHECK(f.pool->stats().blocked_bytes > 0);
  for (std::uint32_t other = near; other < kRowCount; other += kRowBits) {
    if (other != far) CHECK_OK(f.pool->row_quiesced(other));
  }
  CHECK_EQ(copy(f.pool->stats().blocked_bytes), 0);
  CHECK_OK(validate(*f.pool));
}

// Where the file system is full, to read a hole ends the process.
TEST(an_entry_whose_extent_lies_in_a_hole_is_not_adopted) {
  Fixture f;
  const std::uint32_t a = f.row(1);
  const auto keys = chain(1, 4), reserved = chain(2, 1);
  f.store(keys);
  const auto extents = f.lease(keys, {a}).extents;
  f.reserve(reserved, a);  // nobody has written to it yet
  CHECK_OK(f.pool->row_gone(a));
  f.reserve(reserved, f.row(2));
  for (const std::uint32_t entry : {1, 3})
    CHECK_EQ(fallocate(f.files.extents, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                       static_cast<off_t>(extents[entry].offset + 4096 * (entry / 2)), 4096),
             0);
  f.adopt();
  CHECK_EQ(f.count(EntryState::kUnverified), 2);
  CHECK_EQ(f.count(EntryState::kQuarantined), 1);
  CHECK_EQ(copy(f.pool->stats().adoption_dropped), 2);
  std::uint64_t remaining = 9;
  CHECK_OK(f.pool->verify_next(1 << 30, &remaining));
  CHECK_EQ(f.peek(keys), 1);
  CHECK_OK(validate(*f.pool));
}

TEST(what_a_device_may_still_write_stays_quarantined_until_its_row_is_said_to_be_gone) {
  Fixture f;
  const std::uint32_t gpu = f.row(1, true), host = f.row(2);
  const auto leased = chain(1, 3);
  f.store(leased);
  f.lease(leased, {gpu});
  f.reserve(chain(2, 2), gpu);
  f.reserve(chain(3, 1), host);
  for (int crash = 0; crash < 2; ++crash) {
    f.adopt();
    CHECK_EQ(f.row(1), gpu);  // attached again without saying it: the flag stays
    for (const RowInfo& row : f.pool->rows())
      CHECK_EQ(row.registers_memory, row.row == gpu);
    std::uint64_t kept = 0;
    CHECK_OK(f.pool->row_stranded(gpu, &kept));
    CHECK_EQ(kept, 2 * kRecordBytes);
    CHECK_EQ(f.count(EntryState::kQuarantined), crash == 0 ? 3 : 2);
    CHECK_OK(validate(*f.pool));
    if (crash == 0) CHECK_OK(f.pool->row_gone(host));
    CHECK_EQ(f.pool->rows().size(), 1);
  }
  // What it only read is like any other chunk again.
  for (std::uint64_t p = 10; p < 60; ++p)
    f.store(chain(p, 4));
  CHECK_EQ(f.count(EntryState::kUnverified), 0);
  CHECK_EQ(f.count(EntryState::kQuarantined), 2);
  CHECK_OK(f.pool->row_gone(gpu));
  CHECK_EQ(f.count(EntryState::kQuarantined), 0);
  CHECK_EQ(f.pool->rows().size(), 0);
  CHECK_OK(validate(*f.pool));
  // A new session in this row starts afresh.
  CHECK_EQ(f.row(3), gpu);
  CHECK(!f.pool->rows()[0].registers_memory);
}

TEST(a_row_is_current_old_or_stranded_as_its_processes_say) {
  Fixture f;
  const std::uint32_t row = f.row(1, true);
  const auto is_old = [&] { return f.pool->rows().at(0).old; };
  std::uint64_t kept = 0;
  CHECK(!is_old());
  CHECK_OK(f.pool->row_quiesced(row));  // stays CURRENT
  CHECK(!is_old());
  f.reserve(chain(1, 1), row);
  f.adopt();
  CHECK(is_old());
  CHECK_EQ(f.row(1), row);  // the same session attaches again: still OLD
  CHECK(is_old());
  CHECK_OK(f.pool->row_stranded(row, &kept));
  CHECK(kept != 0);
  CHECK_OK(f.pool->row_stranded(row, &kept));
  CHECK(is_old());
  CHECK_OK(validate(*f.pool));
  f.adopt();  // STRANDED is forgotten, what it keeps is not
  CHECK(is_old());
  CHECK_EQ(f.count(EntryState::kQuarantined), 1);
  CHECK_OK(f.pool->row_stranded(row, &kept));
  CHECK_OK(f.pool->row_quiesced(row));
  CHECK(!is_old());
  CHECK_EQ(f.count(EntryState::kQuarantined), 0);
  CHECK_OK(f.pool->row_stranded(row, &kept));  // nothing kept: gone
  CHECK_EQ(f.pool->rows().size(), 0);
  CHECK_OK(validate(*f.pool));
}
