// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The eviction policy: evicts the leaf with the least worth.
//
// An entry belongs to a kind: the length of its last pause, if it was used again at all (returned),
// its depth in its prompt, and whether several chunks continue it. If a hint says what comes next,
// the hint and the group of its sender replace the last pause. Each kind learns its hazard of
// return from the time that its entries were exposed; entries that were evicted, or that still
// wait, count for the time that they waited (censoring). A key that comes back after it was evicted
// or refused has its real pause, if it is still remembered. The worth of an entry is the Gittins
// index of its kind at the entry's age (the highest rate of returns that keeping it can bring over
// any time from now on), times the cost of computing a chunk at its depth. Among the entries of one
// size class, which all have equal extents, the leaf with the least worth is the victim; tenants
// with a quota have orders of their own, of which the pool compares the victims. Measured against
// LRU, ARC and S3-FIFO: docs/decisions/13-value.md and benchmarks/value.py.
//
// The entries of a kind form a list, last used first, so only the cold ends of lists are compared:
// by a heap with one bid per list. A bid's worth changes with time. The next victim's is recomputed
// before it is used; all are when a part of a victim's age has passed. An entry that cannot be
// evicted at a cold end (blocked, or with children) leaves the list ("parks"), and returns by
// unblocked(). So a victim is found in amortised logarithmic time.
//
// Value is not thread-safe: called under the pool's lock. A lesson (observations since the last
// one, and a sample of waiting entries) is taken under it; the Learner makes rows of it without it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pool/index.h"
#include "pool/slab.h"

namespace kvstrata {

// The features of an entry that decide its kind. The index has them too, for the next server.
struct Traits {
  std::uint16_t depth = 0;          // chunks before it in its prompt, at most 65,535
  std::uint8_t is_branch : 1 = 0;   // two chunks continued it at once
  std::uint8_t is_tail : 1 = 0;     // the unfinished last chunk of a prompt: worth nothing
  std::uint8_t was_loaded : 1 = 0;  // from L2, for the request that uses it next
  std::uint8_t hint : 4 = 0;        // what comes next, by a hint; 0: no hint
  std::uint8_t pause : 6 = 0;       // its last pause in octaves, 1: less than a second; 0: none;
                                    // with a hint, the group of its sender
  std::uint8_t model : 2 = 0;       // whose cost it has, see Value::set_cost
};
static_assert(sizeof(Traits) == 4);

// The part of an entry in the server's own memory; rebuilt after a restart.
struct alignas(64) EntryLocal {
  // For the policy: the list of its kind, and its data of the entry.
  std::uint32_t list_previous;
  std::uint32_t list_next;
  std::uint32_t used_at;  // ticks, see Value::tell_time
  Traits traits;
  std::uint16_t kind;
  bool known;  // to the policy
  bool parked;
  // Everything below belongs to the pool. `held_back` counts the reasons against eviction that are
  // not in the other counters: reserved, quarantined, touchable by rows of an earlier epoch.
  std::uint8_t held_back;
  std::uint8_t cls;
  std::uint8_t run;
  std::uint8_t marks;
  std::uint32_t slot;
  std::uint32_t pins;
  std::uint32_t leases;
  std::uint32_t children;
  // Family: entries whose parent this is.
  std::uint32_t first_child;
  std::uint32_t next_sibling;
  std::uint32_t previous_sibling;
  std::uint16_t order;  // of the policy, see Value::victim; that of the entry's tenant

  // Cannot be evicted, whatever its children.
  bool is_blocked() const noexcept { return pins != 0 || leases != 0 || held_back != 0; }
  bool is_victim() const noexcept { return !is_blocked() && children == 0; }
  bool is_tail() const noexcept { return traits.is_tail != 0; }
};
static_assert(sizeof(EntryLocal) == 64);

// Ages: the first is less than 2^kFirstOctave ticks (1 s), then half octaves; the last has no end.
inline constexpr int kFirstOctave = 6;
inline constexpr int kAges = 35;
// Traits::pause of an entry that returned after a pause that nobody knows.
inline constexpr std::uint8_t kNoPause = 31;
// A tick is 2^24 ns (17 ms), so ticks wrap after two years of uptime.
inline constexpr int kTickShift = 24;
inline constexpr std::size_t kMaxKinds = 2'048;

// A statement about the next request that will use the chunks of a prompt. Hints are not
// trusted: a hint is a feature of a kind, so its value is learnt, by groups of tenants. Stored in
// the index and in the log of requests (docs/internals/formats.md).
struct Hint {
  static constexpr std::uint8_t kNext = 15;   // Traits::hint; the names are in kvstrata.types.Next
  static constexpr std::uint8_t kGroups = 7;  // tenants fall into them by their numbers

  std::uint8_t next;
  std::uint8_t group;
};

// Counts of waits by the age at which they ended (or are now), and of those among them that ended
// with a return. `rest`: the ticks that they spent in the age where they ended.
struct WaitCounts {
  float ended[kAges] = {};
  float rest[kAges] = {};
  float back[kAges] = {};

  void add(std::uint32_t age_ticks, bool returned, float weight) noexcept;
  void add(const WaitCounts& other) noexcept;
  void scale(float factor) noexcept;
};

// Features of a kind, from which its number follows: pause or group, depth (log2), branch, hint,
// model.
using Features = std::uint16_t;
inline constexpr std::size_t kPauses = 32;
inline constexpr std::size_t kSomes = kPauses + Hint::kNext + 1;
// The pause, or the hint without its group.
constexpr std::size_t some_of(Features features) noexcept {
  const std::size_t hint = features >> 10 & Hint::kNext;
  return hint == 0 ? features % kPauses : kPauses + hint;
}
inline constexpr std::size_t kFeatures = std::size_t{1} << 16;

// By age: the Gittins index at its beginning; at last, at the end of the last.
using Row = std::array<float, kAges + 1>;

// The input of a Learner. All by the number of a kind.
struct Lesson {
  std::vector<Features> kinds;
  std::vector<WaitCounts> ended;
  std::vector<WaitCounts> waiting;  // a sample of the entries in the pool, weighted
};

// The learnt state of all kinds. Evidence decays: a lesson counts half after 34 further ones.
class Learner {
 public:
  // Rows for Value::teach().
  std::vector<Row> learn(const Lesson& lesson);
  // Saves the learnt state, at most 1 MiB, and restores it. False, without a change, if `bytes`
  // are not a saved state.
  std::string save() const;
  [[nodiscard]] bool restore(std::string_view bytes);
  const std::vector<Features>& kinds() const noexcept { return kinds_; }

  // Where Value finds the row of: all kinds, those of this pause or hint, a kind.
  static std::size_t row_of_all() noexcept { return 0; }
  static std::size_t row_of_some(Features features) noexcept { return 1 + some_of(features); }
  static std::size_t row_of(std::size_t kind) noexcept { return 1 + kSomes + kind; }
  // The row of all before anything was learnt: the hazard falls as the age grows.
  static Row prior() noexcept;

 private:
  std::vector<Features> kinds_;
  std::vector<WaitCounts> ended_;
};

class Value {
 public:
  // Kinds that no feature decides: tails, and everything of LRU or beyond kMaxKinds.
  static constexpr std::uint16_t kTails = 0;
  static constexpr std::uint16_t kAny = 1;
  static constexpr std::uint32_t kLearnRequests = 512;
  static constexpr std::size_t kModels = 4;
  static constexpr std::size_t kMaxIdentities = 1 << 16;

  // `name`: VALUE; LRU, which has one kind, worth less the older it is; or noop, which has no
  // victim, so nothing else may be evicted either. `depth_cost`: each chunk of a prompt costs this
  // more than the one before it, as a share of the first one's cost. `entries` must outlive the
  // policy. It remembers about as many keys that left as there are entries.
  Value(std::string_view name, double depth_cost, EntryLocal* entries, std::size_t n_entries);
  static bool is_name(std::string_view name) noexcept;

  const char* name() const noexcept { return name_; }
  // From now on as LRU: for a pool with windows or states, which are worth something only together
  // with what precedes them (docs/decisions/02-l1.md).
  void use_age_alone() noexcept { is_lru_ = true; }
  bool uses_age_alone() const noexcept { return is_lru_; }
  bool evicts() const noexcept { return evicts_; }

  // The chunks of an identity are those of a model, by the first word of its root and the model's
  // number below kModels; 0 is that of all others. At most kMaxIdentities are remembered.
  void set_model(std::uint64_t identity, std::uint8_t model);
  std::uint8_t model_of(std::uint64_t identity) const noexcept;
  // A chunk of this model costs so many times as much, per byte, as an average one of its depth.
  void set_cost(std::uint8_t model, double cost) noexcept;

  // The time of all calls from now on.
  void tell_time(std::uint64_t monotonic_ns) noexcept {
    now_ = static_cast<std::uint32_t>(monotonic_ns >> kTickShift);
  }
  // The entry is in the pool now, as the hottest of its kind. Its traits, size class and time of
  // use are set; a time that lies ahead becomes now.
  void insert(std::uint32_t entry);
  // It was used: again, or, with `same`, by the request that used it last, or by a peer.
  void touch(std::uint32_t entry, bool same = false);
  // A second chunk continues it.
  void branch(std::uint32_t entry);
  // A hint about what comes next; valid until the entry is used again. False if it changes
  // nothing.
  bool hint(std::uint32_t entry, Hint hint);
  // It is about to leave the pool. `tag`: the first word of its key. `evicted`: for the sake of
  // room.
  void remove(std::uint32_t entry, std::uint64_t tag, bool evicted) noexcept;
  // A parked entry may be a victim again. It goes to the hot end if it was in use until now
  // (`used`), else to the cold end. Does nothing for an entry that is not parked.
  void unblocked(std::uint32_t entry, bool used);
  // The next entry of the size class and the order to evict, or kNoEntry; likewise if the order's
  // least bid is not below `below`. It stays until remove().
  std::uint32_t victim(std::uint32_t cls, std::size_t order = 0, float below = kNoBid);
  // Entries are compared with those of their own order only; 0 is there from the beginning, and
  // this makes a further one, which gets the next number.
  void add_order() { orders_.emplace_back(); }
  // Puts the entry into another order, as the hottest of its kind.
  void move(std::uint32_t entry, std::uint16_t order);
  float worth(std::uint32_t entry) const noexcept;
  // Those of a chunk that is not in the pool.
  Traits traits_of_new(std::uint64_t tag, std::size_t depth, std::uint8_t model = 0) const noexcept;
  // Infinite before anything was learnt.
  float worth_of_new(Traits traits) const noexcept;
  // It was not stored, since it was worth less.
  void refused(std::uint64_t tag) noexcept { remember(tag, now_); }
  std::uint32_t now() const noexcept { return now_; }
  // The class id stands for another size from now on. REQUIRES: the class has no entry.
  void forget_class(std::uint32_t cls) noexcept {
    for (Order& order : orders_)
      order[cls] = SizeClass{};
  }

  // Begins a lesson, if kLearnRequests requests have passed since the last one.
  void count_request() noexcept { requests_ += 1; }
  bool begin_lesson(Lesson* lesson);
  // Adds `n` entries below `n_entries`, chosen at random, that stand for `weight` each.
  void sample(Lesson* lesson, int n, std::uint32_t n_entries, float weight);
  void teach(std::vector<Row> rows) noexcept;
  // Takes over the kinds of what was restored, and its rows. REQUIRES: no entry was inserted yet.
  void resume(Learner* learner);

 private:
  friend class Validation;  // of the tests

  static constexpr float kNoBid = std::numeric_limits<float>::infinity();
  struct List {
    std::uint32_t hot = kNoEntry;
    std::uint32_t cold = kNoEntry;
    float bid = kNoBid;
  };
  struct Bid {
    float worth;
    std::uint32_t kind;
    bool operator<(const Bid& other) const noexcept { return worth > other.worth; }  // for a heap
  };
  struct SizeClass {
    std::vector<List> lists;  // by kind
    std::vector<Bid> bids;    // heap, the least worth first; a list's valid bid is List::bid
    std::uint32_t parked = 0;
    std::uint32_t fresh_until = 0;  // ticks
    bool is_fresh = false;
  };
  using Order = std::array<SizeClass, kMaxClasses>;

  // A key that left the pool: part of its tag, and when it was used last.
  struct Memory {
    std::uint32_t tag;
    std::uint32_t used_at;
  };

  void remember(std::uint64_t tag, std::uint32_t used_at) noexcept {
    memories_[tag & (n_memories_ - 1)] = {static_cast<std::uint32_t>(tag >> 32), used_at};
  }
  std::uint16_t kind_of(Traits traits);
  float cost_of(Features features) const noexcept;
  void change_kind(std::uint32_t entry);  // its traits have changed
  std::uint16_t add_kind(Features features);
  float worth_of(std::size_t row, std::uint32_t age) const noexcept;
  std::size_t row_of(std::uint16_t kind) const noexcept;
  SizeClass& size_of(const EntryLocal& local) noexcept { return orders_[local.order][local.cls]; }
  void bid_all_anew() noexcept;
  List& list_of(EntryLocal& local);
  void push_hot(std::uint32_t entry);
  void push_cold(std::uint32_t entry);
  void take(std::uint32_t entry) noexcept;  // out of its list, or of the parked
  void unlink(List& list, std::uint32_t entry) noexcept;
  void offer(SizeClass& size, std::uint16_t kind, std::uint32_t entry);
  std::uint32_t cold_leaf(SizeClass& size, std::uint32_t kind) noexcept;
  void bid_anew(SizeClass& size);

  EntryLocal* const entries_;
  const char* name_;
  bool evicts_;
  bool is_lru_;
  const float depth_cost_;
  std::uint32_t now_ = 0;
  std::uint32_t requests_ = 0;
  std::uint64_t random_ = 88'172'645'463'325'252u;
  std::vector<Features> kinds_;  // by number
  std::vector<float> costs_;     // likewise
  std::array<float, kModels> model_costs_ = {1, 1, 1, 1};
  std::unordered_map<std::uint64_t, std::uint8_t> models_;  // by identity
  std::vector<std::uint16_t> number_of_;                    // by features, 0: not seen yet
  std::vector<WaitCounts> ended_;                           // since the last lesson, by number
  std::vector<Row> rows_;
  std::size_t learnt_ = 0;  // kinds that have a row
  // By the low bits of the tag. Pages that were never written take no memory.
  std::size_t n_memories_;
  std::unique_ptr<Memory[], decltype(&std::free)> memories_;
  std::deque<Order> orders_;
};

}  // namespace kvstrata
