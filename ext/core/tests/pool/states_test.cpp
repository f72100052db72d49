// What each operation does in each state of an entry.
#include <string>
#include <vector>

#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// A pool with one entry of the key chain(1, 1) in this state. A QUARANTINED one is held by `hold`.
struct OneEntry : Fixture {
  std::vector<Key> keys = chain(1, 1);
  std::uint32_t process = row(1);
  std::uint64_t ticket = 0;  // of its reservation
  Hold hold;

  explicit OneEntry(EntryState state) {
    using enum EntryState;
    if (state == kFree) return;
    const auto reserved = reserve(keys, process);
    ticket = reserved.ticket;
    write(reserved.extents[0], keys[0]);
    if (state == kQuarantined) {
      CHECK_OK(pool->hold_reserved(ticket, 0, &hold));
      CHECK_EQ(pool->abort(ticket, {}, true), 1);
    }
    if (state == kReady || state == kUnverified) commit_one(ticket, 0);
    if (state == kUnverified) adopt();
    CHECK_EQ(now(), state);
  }
  EntryState now() {
    for (int state = 1; state < kEntryStateCount; ++state) {
      if (pool->stats().entries[state] != 0) return static_cast<EntryState>(state);
    }
    return EntryState::kFree;
  }
  // Keeps the bytes of a linked entry in use.
  void use() {
    CHECK_OK(now() == EntryState::kReserved ? pool->hold_reserved(ticket, 0, &hold)
                                            : pool->hold(keys[0], nullptr, &hold));
  }
};

constexpr char kLetters[] = "FRRUQ";  // FREE, RESERVED, READY, UNVERIFIED, QUARANTINED

struct Operation {
  const char* name;
  void (*run)(OneEntry& one);
  const char* after;  // letters of the states that follow FREE, RESERVED, READY, UNVERIFIED, QUAR.
};

// What is refused leaves the state as it is. A quarantined entry has no key any more, so operations
// by key do not concern it.
const Operation kOperations[] = {
    {"commit", [](OneEntry& one) { one.commit_one(one.ticket, 0); }, "FRRUQ"},
    {"abort", [](OneEntry& one) { one.pool->abort(one.ticket, {}, true); }, "FFRUQ"},
    {"abort in use",
     [](OneEntry& one) {
       if (one.now() == EntryState::kReserved) one.use();
       one.pool->abort(one.ticket, {}, true);
     },
     "FQRUQ"},
    {"remove", [](OneEntry& one) { one.pool->remove(packed(one.keys).data(), 1); }, "FRFFQ"},
    {"clear", [](OneEntry& one) { one.pool->clear(-1); }, "FRFFQ"},
    {"clear in use",
     [](OneEntry& one) {
       if (one.now() == EntryState::kReady) one.use();
       one.pool->clear(-1);
     },
     "FRQFQ"},
    {"verify",
     [](OneEntry& one) {
       std::uint64_t good = 0, bad = 0;
       CHECK_OK(one.pool->verify(packed(one.keys).data(), 1, &good, &bad));
     },
     "FRRRQ"},
    {"evict",
     [](OneEntry& one) {
       for (std::uint64_t prompt = 10; prompt < 80; ++prompt)
         one.store(chain(prompt, 2));
       CHECK_EQ(one.pool->clear(-1).kept, 0);  // the entries that took its room
     },
     "FRFFQ"},
    {"unused", [](OneEntry& one) { one.hold.drop(); }, "FRRUF"},
    {"owner gone", [](OneEntry& one) { CHECK_OK(one.pool->row_gone(one.process)); }, "FFRUQ"},
    {"adopt", [](OneEntry& one) { one.hold.drop(), one.adopt(); }, "FQUUF"},
    {"adopt unused",
     [](OneEntry& one) {
       CHECK_OK(one.pool->row_gone(one.process));
       one.hold.drop();
       one.adopt();
     },
     "FFUUF"},
};

}  // namespace

TEST(every_operation_in_every_state_of_an_entry) {
  for (const Operation& operation : kOperations) {
    for (int state = 0; state < kEntryStateCount; ++state) {
      OneEntry one(static_cast<EntryState>(state));
      operation.run(one);
      const char after = kLetters[static_cast<int>(one.now())];
      const std::string where = std::string(operation.name) + " in " + kLetters[state] + ": ";
      CHECK_EQ(where + after, where + operation.after[state]);
      CHECK_OK(one.pool->validate());
    }
  }
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
  CHECK_OK(f.pool->validate());
  f.adopt();  // STRANDED is forgotten, what it keeps is not
  CHECK(is_old());
  CHECK_EQ(f.count(EntryState::kQuarantined), 1);
  CHECK_OK(f.pool->row_stranded(row, &kept));
  CHECK_OK(f.pool->row_quiesced(row));
  CHECK(!is_old());
  CHECK_EQ(f.count(EntryState::kQuarantined), 0);
  CHECK_OK(f.pool->row_stranded(row, &kept));  // nothing kept: gone
  CHECK_EQ(f.pool->rows().size(), 0);
  CHECK_OK(f.pool->validate());
}
