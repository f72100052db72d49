// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/value.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace kvstrata {

namespace {

// ---- ages

// The first tick of each age, and the end of the last one.
const std::array<float, kAges + 1>& starts() noexcept {
  static const std::array<float, kAges + 1> table = [] {
    std::array<float, kAges + 1> made{};
    for (int age = 1; age <= kAges; ++age)
      made[static_cast<std::size_t>(age)] =
          std::exp2(kFirstOctave + static_cast<float>(age - 1) / 2);
    return made;
  }();
  return table;
}

int age_of(std::uint32_t ticks) noexcept {
  if (ticks >> kFirstOctave == 0) return 0;
  const int octave = static_cast<int>(std::bit_width(ticks)) - 1;
  // Whether it is in the upper half of the octave: at least sqrt(2) times its beginning.
  const bool upper = std::uint64_t{ticks} * ticks >= std::uint64_t{2} << (2 * octave);
  return std::min(kAges - 1, 1 + 2 * (octave - kFirstOctave) + (upper ? 1 : 0));
}

float width(int age) noexcept {
  return starts()[static_cast<std::size_t>(age) + 1] - starts()[static_cast<std::size_t>(age)];
}

// ---- hazards

using Hazard = std::array<float, kAges>;  // returns per tick, by age

// Returns that the hazard of a wider set of kinds weighs as much as. The chunks of a prompt return
// together, so these are few prompts.
constexpr float kPriorReturns = 256;
constexpr float kFade = 0.98F;

Hazard first_hazard() noexcept {
  constexpr float kTenSeconds = 600;  // ticks
  Hazard hazard;
  for (int age = 0; age < kAges; ++age) {
    hazard[static_cast<std::size_t>(age)] =
        0.3F / std::max(kTenSeconds, starts()[static_cast<std::size_t>(age)] + 0.2F * width(age));
  }
  return hazard;
}

// Returns of each age over the time that entries were exposed in it, with a gamma prior. Kinds that
// return less than the prior says at one age are expected to do so at the next one too, by half (on
// a logarithmic scale): nobody has seen ages beyond the time that entries live in the pool.
Hazard hazard_of(const WaitCounts& counts, const Hazard& prior) noexcept {
  std::array<float, kAges> exposed;
  float older = 0;
  for (int age = kAges - 1; age >= 0; --age) {
    const auto i = static_cast<std::size_t>(age);
    exposed[i] = counts.rest[i] + older * width(age);
    older += counts.ended[i];
  }
  Hazard hazard;
  float ratio = 1;
  for (std::size_t i = 0; i < kAges; ++i) {
    hazard[i] =
        (counts.back[i] + kPriorReturns) / (exposed[i] + kPriorReturns / (prior[i] * ratio));
    ratio = std::sqrt(hazard[i] / prior[i]);
  }
  return hazard;
}

// At the beginning of each age: the highest rate of returns that any time to wait from then on has,
// chance of a return over the expected time until the return or the end of the wait.
Row index_of(const Hazard& hazard) noexcept {
  std::array<float, kAges> returns, ticks;  // that one age adds, for an entry that reaches it
  for (int age = 0; age < kAges; ++age) {
    const auto i = static_cast<std::size_t>(age);
    returns[i] = 1 - std::exp(-hazard[i] * width(age));
    ticks[i] = returns[i] / hazard[i];
  }
  Row row;
  for (std::size_t from = 0; from < kAges; ++from) {
    float reach = 1, all_returns = 0, all_ticks = 0, best = 0;
    for (std::size_t i = from; i < kAges; ++i) {
      all_returns += reach * returns[i];
      all_ticks += reach * ticks[i];
      reach *= 1 - returns[i];
      best = std::max(best, all_returns / all_ticks);
    }
    row[from] = best;
  }
  row[kAges] = row[kAges - 1];
  return row;
}

Features features_of(Traits traits) noexcept {
  const int depth = std::min(15, static_cast<int>(std::bit_width(traits.depth)));
  return static_cast<Features>(traits.pause | depth << 5 | traits.is_branch << 9 |
                               traits.hint << 10 | traits.model << 14);
}

std::uint8_t pause_after(std::uint32_t ticks) noexcept {
  return static_cast<std::uint8_t>(1 + (age_of(ticks) + 1) / 2);
}

// The middle of the depths of a kind.
float depth_of(Features features) noexcept {
  const int depth = features >> 5 & 15;
  return depth == 0 ? 0 : 1.5F * static_cast<float>(1 << (depth - 1));
}

constexpr char kSavedMagic[8] = {'K', 'V', 'K', 'I', 'N', 'D', 'S', '1'};

}  // namespace

void WaitCounts::add(std::uint32_t age_ticks, bool returned, float weight) noexcept {
  const auto age = static_cast<std::size_t>(age_of(age_ticks));
  ended[age] += weight;
  rest[age] += weight * std::min(static_cast<float>(age_ticks) - starts()[age],
                                 starts()[age + 1] - starts()[age]);
  if (returned) back[age] += weight;
}

void WaitCounts::add(const WaitCounts& other) noexcept {
  for (int age = 0; age < kAges; ++age) {
    ended[age] += other.ended[age];
    rest[age] += other.rest[age];
    back[age] += other.back[age];
  }
}

void WaitCounts::scale(float factor) noexcept {
  for (int age = 0; age < kAges; ++age) {
    ended[age] *= factor;
    rest[age] *= factor;
    back[age] *= factor;
  }
}

// ---- learning

Row Learner::prior() noexcept {
  return index_of(first_hazard());
}

std::vector<Row> Learner::learn(const Lesson& lesson) {
  const std::size_t n = lesson.kinds.size();
  kinds_ = lesson.kinds;
  ended_.resize(n);
  WaitCounts all;
  std::vector<WaitCounts> some(kSomes), each(n);
  for (std::size_t kind = 0; kind < n; ++kind) {
    ended_[kind].scale(kFade);
    ended_[kind].add(lesson.ended[kind]);
    if (kind == Value::kTails) continue;
    each[kind] = ended_[kind];
    each[kind].add(lesson.waiting[kind]);
    all.add(each[kind]);
    some[some_of(kinds_[kind])].add(each[kind]);
  }
  std::vector<Row> rows;
  rows.reserve(row_of(n));
  const Hazard of_all = hazard_of(all, first_hazard());
  rows.push_back(index_of(of_all));
  std::vector<Hazard> of_some;
  for (const WaitCounts& counts : some) {
    of_some.push_back(hazard_of(counts, of_all));
    rows.push_back(index_of(of_some.back()));
  }
  for (std::size_t kind = 0; kind < n; ++kind)
    rows.push_back(index_of(hazard_of(each[kind], of_some[some_of(kinds_[kind])])));
  return rows;
}

std::string Learner::save() const {
  std::string bytes(kSavedMagic, sizeof kSavedMagic);
  const std::size_t n = ended_.size();
  bytes.append(reinterpret_cast<const char*>(kinds_.data()), n * sizeof(Features));
  bytes.append(reinterpret_cast<const char*>(ended_.data()), n * sizeof(WaitCounts));
  return bytes;
}

bool Learner::restore(std::string_view bytes) {
  constexpr std::size_t kKindBytes = sizeof(Features) + sizeof(WaitCounts);
  if (bytes.size() < sizeof kSavedMagic ||
      std::memcmp(bytes.data(), kSavedMagic, sizeof kSavedMagic) != 0)
    return false;
  bytes.remove_prefix(sizeof kSavedMagic);
  const std::size_t n = bytes.size() / kKindBytes;
  if (bytes.size() % kKindBytes != 0 || n > kMaxKinds) return false;
  std::vector<Features> kinds(n);
  std::vector<WaitCounts> ended(n);
  if (n != 0) {
    std::memcpy(kinds.data(), bytes.data(), n * sizeof(Features));
    std::memcpy(ended.data(), bytes.data() + n * sizeof(Features), n * sizeof(WaitCounts));
  }
  for (std::size_t kind = 0; kind < n; ++kind) {
    const auto* counts = reinterpret_cast<const float*>(&ended[kind]);
    const auto is_count = [](float count) { return count >= 0 && count < 1e30F; };
    if (!std::all_of(counts, counts + sizeof(WaitCounts) / sizeof(float), is_count)) return false;
  }
  kinds_ = std::move(kinds);
  ended_ = std::move(ended);
  return true;
}

bool Value::begin_lesson(Lesson* lesson) {
  if (is_lru_ || requests_ < kLearnRequests) return false;
  requests_ = 0;
  lesson->kinds = kinds_;
  lesson->ended.assign(kinds_.size(), WaitCounts{});
  lesson->waiting.assign(kinds_.size(), WaitCounts{});
  lesson->ended.swap(ended_);
  return true;
}

void Value::sample(Lesson* lesson, int n, std::uint32_t n_entries, float weight) {
  for (int i = 0; i < n && n_entries != 0; ++i) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    const EntryLocal& local = entries_[(random_ >> 20) % n_entries];
    if (local.known && local.kind < lesson->waiting.size())
      lesson->waiting[local.kind].add(now_ - local.used_at, false, weight);
  }
}

void Value::teach(std::vector<Row> rows) noexcept {
  rows_.swap(rows);
  learnt_ = rows_.size() - Learner::row_of(0);
  bid_all_anew();
}

void Value::resume(Learner* learner) {
  const std::vector<Features>& kinds = learner->kinds();
  for (std::size_t kind = kinds_.size(); kind < kinds.size(); ++kind)
    add_kind(kinds[kind]);
  const std::vector<WaitCounts> none(kinds_.size());
  teach(learner->learn({kinds_, none, none}));
}

// ---- kinds and their worth

bool Value::is_name(std::string_view name) noexcept {
  return name == "VALUE" || name == "LRU" || name == "noop";
}

Value::Value(std::string_view name, double depth_cost, EntryLocal* entries, std::size_t n_entries)
    : entries_(entries),
      name_(name == "LRU"    ? "LRU"
            : name == "noop" ? "noop"
                             : "VALUE"),
      evicts_(name != "noop"),
      is_lru_(name != "VALUE"),
      depth_cost_(static_cast<float>(depth_cost)),
      number_of_(kFeatures),
      rows_{Learner::prior()},
      n_memories_(is_lru_ ? 1 : std::bit_ceil(n_entries)),
      memories_(static_cast<Memory*>(std::calloc(n_memories_, sizeof(Memory))), &std::free),
      orders_(1) {
  if (memories_ == nullptr) std::abort();  // out of memory
  add_kind(0);                             // kTails
  number_of_[0] = add_kind(0);             // kAny: never used again, at no depth
}

std::uint16_t Value::add_kind(Features features) {
  const auto number = static_cast<std::uint16_t>(kinds_.size());
  number_of_[features] = number;
  kinds_.push_back(features);
  costs_.push_back(number == kTails ? 0 : cost_of(features));
  ended_.emplace_back();
  return number;
}

float Value::cost_of(Features features) const noexcept {
  return model_costs_[features >> 14] * (1 + depth_cost_ * depth_of(features));
}

void Value::set_model(std::uint64_t identity, std::uint8_t model) {
  if (models_.size() >= kMaxIdentities) models_.clear();
  models_[identity] = model % kModels;
}

std::uint8_t Value::model_of(std::uint64_t identity) const noexcept {
  const auto found = models_.find(identity);
  return found == models_.end() ? 0 : found->second;
}

void Value::set_cost(std::uint8_t model, double cost) noexcept {
  model_costs_[model % kModels] = static_cast<float>(cost);
  for (std::size_t kind = kAny; kind < kinds_.size(); ++kind)
    costs_[kind] = cost_of(kinds_[kind]);
  bid_all_anew();
}

std::uint16_t Value::kind_of(Traits traits) {
  if (traits.is_tail) return kTails;
  if (is_lru_) return kAny;
  const Features features = features_of(traits);
  const std::uint16_t known = number_of_[features];
  if (known != 0) return known;
  return kinds_.size() < kMaxKinds ? add_kind(features) : kAny;
}

std::size_t Value::row_of(std::uint16_t kind) const noexcept {
  if (kind < learnt_) return Learner::row_of(kind);
  return learnt_ == 0 ? Learner::row_of_all() : Learner::row_of_some(kinds_[kind]);
}

float Value::worth_of(std::size_t row, std::uint32_t age_ticks) const noexcept {
  const auto age = static_cast<std::size_t>(age_of(age_ticks));
  const float begin = starts()[age];
  const float share =
      std::min(1.0F, (static_cast<float>(age_ticks) - begin) / (starts()[age + 1] - begin));
  return rows_[row][age] * (1 - share) + rows_[row][age + 1] * share;
}

float Value::worth(std::uint32_t entry) const noexcept {
  const EntryLocal& local = entries_[entry];
  const std::uint32_t age = now_ - local.used_at;
  if (is_lru_ && local.kind != kTails) return 1 / (1 + static_cast<float>(age));
  return worth_of(row_of(local.kind), age) * costs_[local.kind];
}

Traits Value::traits_of_new(std::uint64_t tag, std::size_t depth,
                            std::uint8_t model) const noexcept {
  Traits traits;
  traits.depth = static_cast<std::uint16_t>(std::min<std::size_t>(depth, 65'535));
  traits.model = model % kModels;
  const Memory& memory = memories_[tag & (n_memories_ - 1)];
  if (memory.tag == static_cast<std::uint32_t>(tag >> 32) && memory.used_at != 0)
    traits.pause = pause_after(now_ - memory.used_at);
  return traits;
}

float Value::worth_of_new(Traits traits) const noexcept {
  if (is_lru_ || learnt_ == 0) return std::numeric_limits<float>::infinity();
  const Features features = features_of(traits);
  const std::uint16_t kind = number_of_[features];
  const std::size_t row = kind != 0 ? row_of(kind) : Learner::row_of_some(features);
  return worth_of(row, 0) * cost_of(features);
}

// ---- entries

void Value::insert(std::uint32_t entry) {
  EntryLocal& local = entries_[entry];
  if (now_ - local.used_at > std::uint32_t{1} << 31) local.used_at = now_;
  local.traits.pause = std::min<std::uint8_t>(local.traits.pause, kNoPause);
  local.kind = kind_of(local.traits);
  local.known = true;
  local.parked = false;
  push_hot(entry);
}

void Value::touch(std::uint32_t entry, bool same) {
  EntryLocal& local = entries_[entry];
  if (!local.known) return;
  take(entry);
  const std::uint32_t age = now_ - local.used_at;
  Traits& traits = local.traits;
  if (traits.was_loaded) {
    traits.was_loaded = 0;
    if (traits.pause == 0 || traits.hint != 0) traits.pause = kNoPause;
    traits.hint = 0;
  } else if (!same) {
    ended_[local.kind].add(age, true, 1);
    traits.pause = pause_after(age);
    traits.hint = 0;
  }
  local.used_at = now_;
  local.kind = kind_of(traits);
  push_hot(entry);
}

void Value::branch(std::uint32_t entry) {
  EntryLocal& local = entries_[entry];
  if (!local.known || local.traits.is_branch) return;
  local.traits.is_branch = 1;
  change_kind(entry);
}

bool Value::hint(std::uint32_t entry, Hint hint) {
  Traits& traits = entries_[entry].traits;
  if (!entries_[entry].known || is_lru_ || (traits.hint == hint.next && traits.pause == hint.group))
    return false;
  traits.hint = hint.next & Hint::kNext;
  traits.pause = std::min(hint.group, Hint::kGroups);
  change_kind(entry);
  return true;
}

void Value::change_kind(std::uint32_t entry) {
  EntryLocal& local = entries_[entry];
  if (local.parked) {
    local.kind = kind_of(local.traits);
    return;
  }
  take(entry);
  local.kind = kind_of(local.traits);
  push_hot(entry);
}

void Value::remove(std::uint32_t entry, std::uint64_t tag, bool evicted) noexcept {
  EntryLocal& local = entries_[entry];
  if (!local.known) return;
  take(entry);
  local.known = false;
  if (is_lru_) return;
  ended_[local.kind].add(now_ - local.used_at, false, 1);
  if (evicted) remember(tag, local.used_at);
}

void Value::unblocked(std::uint32_t entry, bool used) {
  EntryLocal& local = entries_[entry];
  if (!local.parked) return;
  take(entry);
  if (used) {
    local.used_at = now_;
    push_hot(entry);
  } else {
    push_cold(entry);
  }
}

// ---- victims

std::uint32_t Value::victim(std::uint32_t cls, std::size_t order, float below) {
  if (!evicts_) return kNoEntry;
  SizeClass& size = orders_[order][cls];
  if (!size.is_fresh || static_cast<std::int32_t>(now_ - size.fresh_until) >= 0) bid_anew(size);
  if (!size.bids.empty() && size.bids.front().worth >= below) return kNoEntry;
  while (!size.bids.empty()) {
    const Bid bid = size.bids.front();
    List& list = size.lists[bid.kind];
    const bool is_valid = bid.worth == list.bid;
    const std::uint32_t entry = is_valid ? cold_leaf(size, bid.kind) : kNoEntry;
    if (entry != kNoEntry && worth(entry) <= bid.worth) return entry;
    std::pop_heap(size.bids.begin(), size.bids.end());
    size.bids.pop_back();
    if (is_valid) list.bid = kNoBid;
    if (entry != kNoEntry) offer(size, static_cast<std::uint16_t>(bid.kind), entry);
  }
  return kNoEntry;
}

void Value::move(std::uint32_t entry, std::uint16_t order) {
  EntryLocal& local = entries_[entry];
  const bool parked = local.parked;
  if (local.known) take(entry);
  local.order = order;
  if (parked) {
    local.parked = true;
    size_of(local).parked += 1;
  } else if (local.known) {
    push_hot(entry);
  }
}

void Value::bid_all_anew() noexcept {
  for (Order& order : orders_) {
    for (SizeClass& size : order)
      size.is_fresh = false;
  }
}

void Value::bid_anew(SizeClass& size) {
  size.bids.clear();
  for (std::uint32_t kind = 0; kind < size.lists.size(); ++kind) {
    const std::uint32_t entry = cold_leaf(size, kind);
    size.lists[kind].bid = entry == kNoEntry ? kNoBid : worth(entry);
    if (entry != kNoEntry) size.bids.push_back({size.lists[kind].bid, kind});
  }
  std::make_heap(size.bids.begin(), size.bids.end());
  size.is_fresh = true;
  std::uint32_t age = 0;
  if (!size.bids.empty()) age = now_ - entries_[size.lists[size.bids.front().kind].cold].used_at;
  // Until then no worth changes by much.
  size.fresh_until = now_ + std::clamp<std::uint32_t>(age / 128, 1, 256);
}

void Value::offer(SizeClass& size, std::uint16_t kind, std::uint32_t entry) {
  const float worth_now = worth(entry);
  List& list = size.lists[kind];
  if (!size.is_fresh || worth_now >= list.bid) return;
  list.bid = worth_now;
  size.bids.push_back({worth_now, kind});
  std::push_heap(size.bids.begin(), size.bids.end());
  // Bids that are no longer valid must not pile up.
  if (size.bids.size() > 4 * size.lists.size() + 64) size.is_fresh = false;
}

std::uint32_t Value::cold_leaf(SizeClass& size, std::uint32_t kind) noexcept {
  List& list = size.lists[kind];
  while (list.cold != kNoEntry && !entries_[list.cold].is_victim()) {
    const std::uint32_t entry = list.cold;
    unlink(list, entry);
    entries_[entry].parked = true;
    size.parked += 1;
  }
  return list.cold;
}

// ---- lists

Value::List& Value::list_of(EntryLocal& local) {
  SizeClass& size = size_of(local);
  if (size.lists.size() <= local.kind) size.lists.resize(kinds_.size());
  return size.lists[local.kind];
}

void Value::push_hot(std::uint32_t entry) {
  EntryLocal& local = entries_[entry];
  List& list = list_of(local);
  local.list_previous = kNoEntry;
  local.list_next = list.hot;
  if (list.hot != kNoEntry) entries_[list.hot].list_previous = entry;
  list.hot = entry;
  if (list.cold != kNoEntry) return;
  list.cold = entry;
  offer(size_of(local), local.kind, entry);
}

void Value::push_cold(std::uint32_t entry) {
  EntryLocal& local = entries_[entry];
  List& list = list_of(local);
  local.list_next = kNoEntry;
  local.list_previous = list.cold;
  if (list.cold != kNoEntry) entries_[list.cold].list_next = entry;
  list.cold = entry;
  if (list.hot == kNoEntry) list.hot = entry;
  offer(size_of(local), local.kind, entry);
}

void Value::take(std::uint32_t entry) noexcept {
  EntryLocal& local = entries_[entry];
  SizeClass& size = size_of(local);
  if (local.parked) {
    local.parked = false;
    size.parked -= 1;
  } else {
    unlink(size.lists[local.kind], entry);
  }
}

void Value::unlink(List& list, std::uint32_t entry) noexcept {
  const EntryLocal& local = entries_[entry];
  if (local.list_previous != kNoEntry) {
    entries_[local.list_previous].list_next = local.list_next;
  } else {
    list.hot = local.list_next;
  }
  if (local.list_next != kNoEntry) {
    entries_[local.list_next].list_previous = local.list_previous;
  } else {
    list.cold = local.list_previous;
  }
}

}  // namespace kvstrata
