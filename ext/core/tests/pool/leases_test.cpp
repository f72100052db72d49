#include <vector>

#include "hash/sha256.h"
#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

TEST(a_trimmed_lease_says_what_it_lacks) {
  Fixture f(64);
  const std::uint32_t a = f.row(1);
  const auto other = chain(1, 20), mine = chain(2, 20), whole = chain(3, 15);
  f.store(other);
  f.store(mine);
  f.store(whole);
  CHECK_EQ(copy(f.lease(other, {a}).short_bytes), 0);
  const auto trimmed = f.lease(mine, {a});
  CHECK_EQ(trimmed.n_chunks, 12);
  CHECK_EQ(trimmed.short_bytes, 8 * kRecordBytes);
  CHECK_EQ(copy(f.pool->stats().leases_trimmed), 1);
  // Only what is there can be leased, however many keys are named.
  auto longer = whole;
  for (const Key& key : chain(4, 100))
    longer.push_back(key);
  const auto nothing = f.lease(longer, {a});
  CHECK_EQ(nothing.n_chunks, 0);
  CHECK_EQ(nothing.short_bytes, 15 * kRecordBytes);
  // Keys named again and again want nothing, and wrap nothing.
  std::vector<Key> again(200, other[0]);
  again.insert(again.end(), whole.begin(), whole.end());
  CHECK_EQ(copy(f.lease(again, {a}).short_bytes), 0);
  CHECK_OK(validate(*f.pool));
}

TEST(leases_end_in_order_until_their_bytes_are_enough) {
  Fixture f(64);
  const std::uint32_t a = f.row(1), b = f.row(2);
  std::vector<std::uint64_t> tickets;
  for (std::uint64_t p = 1; p <= 4; ++p) {
    f.store(chain(p, 4));
    tickets.push_back(f.lease(chain(p, 4), {a, b}).ticket);
  }
  // The second one's chunks are leased twice: they are free with its twin.
  tickets.insert(tickets.begin() + 3, f.lease(chain(2, 4), {b}).ticket);
  const auto count = [&](std::uint64_t chunks) {
    return copy(f.pool->leases_to_end(tickets, chunks * kRecordBytes));
  };
  CHECK_EQ(count(0), 0);
  CHECK_EQ(count(1), 1);
  CHECK_EQ(count(4), 1);
  CHECK_EQ(count(5), 3);
  CHECK_EQ(count(9), 4);
  CHECK_EQ(count(13), 5);
  CHECK_EQ(count(100), 5);
  CHECK_EQ(copy(f.pool->stats().leased_bytes), 16 * kRecordBytes);
  CHECK_OK(validate(*f.pool));
  // What somebody else has leased too is not free with it.
  CHECK_EQ(copy(f.pool->leases_to_end({tickets.data() + 1, 1}, kRecordBytes)), 0);
  // A ticket that has ended meanwhile frees nothing.
  CHECK(f.pool->release(tickets[0], -1));
  CHECK_EQ(count(1), 3);
  CHECK_OK(validate(*f.pool));
}

TEST(chunks_that_the_caller_has_itself_are_leased_and_not_used) {
  // Of three prompts, the first one's lease finds so many of its three chunks in the caller's
  // cache.
  for (const std::size_t own_chunks : {0, 2, 3, 1000}) {
    Fixture f(9, "LRU");
    const std::uint32_t a = f.row(1);
    const auto leased = chain(1, 3), second = chain(2, 3);
    f.store(leased);
    f.store(second);
    f.store(chain(3, 3));
    const auto lease = f.lease(leased, {a}, nullptr, {0}, own_chunks);
    CHECK_EQ(lease.n_chunks, 3);
    f.store(chain(4, 1));  // the oldest chunks are leased, so the second prompt loses one
    CHECK_EQ(f.peek(leased), 3);
    CHECK_EQ(f.peek(second), 2);
    CHECK(f.pool->release(lease.ticket, -1));
    f.store(chain(5, 1));
    CHECK_EQ(f.peek(leased), own_chunks < 3 ? 3 : 2);
    CHECK_EQ(f.peek(second), own_chunks < 3 ? 1 : 2);
    CHECK_OK(validate(*f.pool));
  }
}

TEST(a_search_among_many_leases_on_the_same_chunks_ends_and_goes_on_next_time) {
  Fixture f(2'100, "LRU", 2'100);
  const std::uint32_t a = f.row(1);
  const auto document = chain(1, 1'000);
  f.store(document);
  std::vector<std::uint64_t> tickets;
  for (int i = 0; i < 20; ++i)
    tickets.push_back(f.lease(document, {a}).ticket);
  const std::span<const std::uint64_t> all(tickets);
  const std::uint64_t first = f.pool->leases_to_end(all, kRecordBytes);
  CHECK_EQ(first, kMaxEntriesToEnd / 1'000 + 1);
  CHECK_EQ(copy(f.pool->leases_to_end(all.subspan(first), kRecordBytes)), first);
  CHECK_EQ(copy(f.pool->leases_to_end(all.subspan(2 * first), kRecordBytes)), 0);
  for (std::uint64_t i = 0; i < 2 * first; ++i)
    CHECK(f.pool->release(tickets[i], -1));
  CHECK_EQ(copy(f.pool->leases_to_end(all.subspan(2 * first), kRecordBytes)), 2);
  CHECK_OK(validate(*f.pool));
}
