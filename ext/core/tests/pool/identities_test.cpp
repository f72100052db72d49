// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Entries of another identity count as absent, whatever their state.
#include "support/pool_fixture.h"

namespace kvstrata::testing {

namespace {

const Key kForeign = make_key(1'000'000);

struct Root {
  std::uint8_t bytes[32];
  explicit Root(const Key& key) { key.store(bytes); }
};

}  // namespace

TEST(an_entry_of_another_identity_is_absent_in_each_state) {
  const Root own(kIdentity);
  const Root foreign(kForeign);
  for (const EntryState state :
       {EntryState::kReserved, EntryState::kReady, EntryState::kUnverified}) {
    Fixture f;
    std::uint32_t row = f.row(1);
    const auto keys = chain(1, 4);
    if (state == EntryState::kReserved) {
      CHECK_EQ(f.reserve(keys, row).outcomes[0], ReserveOutcome::kReserved);
    } else {
      f.store(keys);
    }
    if (state == EntryState::kUnverified) {
      f.adopt();
      row = f.row(2);
    }
    CHECK_EQ(f.count(state), 4);
    const auto leased = f.lease(keys, {row}, foreign.bytes);
    CHECK(leased.ticket == 0 && leased.n_chunks == 0 && leased.unverified == 0);
    Hold hold;
    CHECK(f.pool->hold(keys[0], foreign.bytes, &hold).code() == StatusCode::kNotFound);
    const auto refused = f.reserve(keys, row, nullptr, kRecordBytes, 0, kForeign);
    for (const std::uint8_t outcome : refused.outcomes)
      CHECK_EQ(outcome, ReserveOutcome::kEntriesFull);
    CHECK_EQ(f.count(state), 4);
    const auto behind =
        f.reserve({make_key(77)}, row, &keys[3], kRecordBytes, 0, kForeign);  // no relative of them
    CHECK(behind.outcomes[0] != static_cast<std::uint8_t>(ReserveOutcome::kPresent));
    CHECK_OK(validate(*f.pool));
    const auto found = f.lease(keys, {row}, own.bytes);
    CHECK_EQ(copy(found.n_chunks), state == EntryState::kReady ? 4 : 0);
    CHECK_EQ(copy(found.unverified), state == EntryState::kUnverified ? 4 : 0);
  }
}

TEST(only_its_own_identity_has_a_chunk_checked) {
  const Root own(kIdentity);
  const Root foreign(kForeign);
  Fixture f;
  const std::uint32_t row = f.row(1);
  const auto keys = chain(1, 1);
  f.store(keys);
  const auto lease = f.lease(keys, {row});
  f.pool->extents_address()[lease.extents[0].offset + 5000] ^= 1;
  bool dropped = true;
  CHECK_OK(f.pool->mark_bad(keys[0], foreign.bytes, &dropped));
  CHECK(!dropped);
  CHECK_EQ(f.peek(keys), 1);
  CHECK_OK(f.pool->mark_bad(keys[0], own.bytes, &dropped));
  CHECK(dropped);
}

TEST(a_record_that_names_another_identity_than_its_entry_leaves) {
  for (const bool adopted : {false, true}) {
    Fixture f;
    const std::uint32_t row = f.row(1);
    const auto keys = chain(1, 2);
    f.store(keys);
    f.write(f.lease(keys, {row}).extents[0], keys[0], 9, kForeign);  // by a process that maps L1
    if (adopted) {
      f.adopt();
      std::uint64_t good = 0;
      std::uint64_t bad = 0;
      CHECK_OK(f.pool->verify(packed(keys).data(), keys.size(), &good, &bad));
      CHECK(good == 1 && bad == 1);
    } else {
      bool dropped = false;
      CHECK_OK(f.pool->mark_bad(keys[0], nullptr, &dropped));
      CHECK(dropped);
    }
    CHECK_EQ(f.peek({keys[0]}), 0);
    CHECK_EQ(f.peek({keys[1]}), 1);
    CHECK_OK(validate(*f.pool));
  }
}

}  // namespace kvstrata::testing
