// Every cell of the two tables of pool/states.h: as written there, and as a pool behaves.
#include "pool/states.h"

#include <string>
#include <vector>

#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

// One letter a cell: the first of the state that follows, '.' where the event cannot happen.
template <typename State, std::size_t kStates, typename Event, std::size_t kEvents>
std::string letters(const Machine<State, kStates, Event, kEvents>& machine, Event event) {
  std::string text;
  for (std::size_t i = 0; i < kStates; ++i) {
    const auto state = static_cast<State>(i);
    text += machine.can(state, event)
                ? machine.states[static_cast<std::size_t>(machine.after(state, event))].name[0]
                : '.';
  }
  return text;
}

template <typename State, std::size_t kStates, typename Event, std::size_t kEvents>
void check_reached(const Machine<State, kStates, Event, kEvents>& machine, State first) {
  std::vector<bool> reached(kStates, false);
  reached[static_cast<std::size_t>(first)] = true;
  for (std::size_t round = 0; round < kStates; ++round) {
    for (std::size_t from = 0; from < kStates; ++from) {
      for (std::size_t event = 0; event < kEvents && reached[from]; ++event) {
        const auto state = static_cast<State>(from);
        if (!machine.can(state, static_cast<Event>(event))) continue;
        reached[static_cast<std::size_t>(machine.after(state, static_cast<Event>(event)))] = true;
      }
    }
  }
  for (std::size_t state = 0; state < kStates; ++state)
    CHECK(reached[state]);
}

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

TEST(every_cell_of_an_entrys_table) {
  using enum EntryEvent;
  // FREE, RESERVED, READY (both R), UNVERIFIED, QUARANTINED.
  const std::pair<EntryEvent, const char*> expected[] = {
      {kReserve, "R...."}, {kCommit, ".R..."}, {kAbort, ".F..."},      {kAbortInUse, ".Q..."},
      {kEvict, "..FF."},   {kDrop, "..FF."},   {kDropInUse, "..QQ."},  {kVerify, "...R."},
      {kUnused, "....F"},  {kAdopt, "..UU."},  {kAdoptInUse, ".QQQQ"}, {kAdoptUnused, "FFFFF"},
  };
  CHECK_EQ(std::size(expected), kEntryEventCount);
  for (std::size_t i = 0; i < kEntryEventCount; ++i) {
    CHECK_EQ(static_cast<std::size_t>(expected[i].first), i);
    CHECK_EQ(letters(kEntryMachine, expected[i].first), std::string(expected[i].second));
  }
  CHECK(kEntryMachine.after(EntryState::kFree, kReserve) == EntryState::kReserved);
  CHECK(kEntryMachine.after(EntryState::kReserved, kCommit) == EntryState::kReady);
  CHECK(kEntryMachine.after(EntryState::kUnverified, kVerify) == EntryState::kReady);
  check_reached(kEntryMachine, EntryState::kFree);
}

TEST(every_cell_of_a_rows_table) {
  using enum RowEvent;
  const std::pair<RowEvent, const char*> expected[] = {
      {kClaim, "CCOS"},  {kQuiesce, ".CCC"}, {kGone, ".UUU"},
      {kStrand, "..SS"}, {kAdopt, "UOOO"},   {kAdoptUnsound, "UUUU"},
  };
  CHECK_EQ(std::size(expected), kRowEventCount);
  for (std::size_t i = 0; i < kRowEventCount; ++i) {
    CHECK_EQ(static_cast<std::size_t>(expected[i].first), i);
    CHECK_EQ(letters(kRowMachine, expected[i].first), std::string(expected[i].second));
  }
  check_reached(kRowMachine, RowState::kUnclaimed);
}

TEST(every_operation_in_every_state_of_an_entry) {
  for (const Operation& operation : kOperations) {
    for (int state = 0; state < kEntryStateCount; ++state) {
      OneEntry one(static_cast<EntryState>(state));
      operation.run(one);
      const char after = kEntryMachine.states[static_cast<int>(one.now())].name[0];
      const std::string where =
          std::string(operation.name) + " in " + kEntryMachine.states[state].name + ": ";
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
