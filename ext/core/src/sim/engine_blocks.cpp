// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "sim/engine_blocks.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <tuple>

namespace kvstrata::sim {

namespace {

constexpr std::uint32_t kNone = KeyTable::kNone;

constexpr std::uint64_t kFirst = 0x9e3779b97f4a7c15, kSecond = 0xbf58476d1ce4e5b9;

// Both halves of a product, folded into one word that depends on all bits of both factors.
std::uint64_t folded(std::uint64_t a, std::uint64_t b) noexcept {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::size_t blocks_of(std::size_t tokens, std::size_t block_tokens) noexcept {
  return (tokens + block_tokens - 1) / block_tokens;
}

}  // namespace

void Sequence::derive_keys(std::size_t n, std::size_t block_tokens) {
  assert(n <= tokens.size() / block_tokens);
  if (keys.size() >= n) {
    return;
  }
  std::uint64_t key = keys.empty() ? root : keys.back();
  keys.reserve(n);
  for (std::size_t block = keys.size(); block < n; ++block) {
    const std::uint32_t* at = tokens.data() + block * block_tokens;
    std::size_t i = 0;
    for (; i + 3 < block_tokens; i += 4) {
      key = folded(key ^ kFirst ^ (std::uint64_t{at[i]} << 32 | at[i + 1]),
                   kSecond ^ (std::uint64_t{at[i + 2]} << 32 | at[i + 3]));
    }
    for (; i < block_tokens; ++i) {
      key = folded(key ^ kFirst, kSecond ^ at[i]);
    }
    keys.push_back(key = folded(key ^ kSecond, kFirst));
  }
}

KeyTable::KeyTable(std::size_t keys)
    : cells_(std::bit_ceil(2 * keys + 2), Cell{0, kNone}), mask_(cells_.size() - 1) {}

std::size_t KeyTable::cell_of(std::uint64_t key) const noexcept {
  std::size_t at = key & mask_;
  while (cells_[at].block != kNone && cells_[at].key != key) {
    at = (at + 1) & mask_;
  }
  return at;
}

std::uint32_t KeyTable::find(std::uint64_t key) const noexcept {
  return cells_[cell_of(key)].block;
}

void KeyTable::set(std::uint64_t key, std::uint32_t block) noexcept {
  cells_[cell_of(key)] = {key, block};
}

void KeyTable::erase(std::uint64_t key) noexcept {
  std::size_t hole = cell_of(key);
  if (cells_[hole].block == kNone) {
    return;
  }
  // Cells behind the hole move into it unless they would then lie before the cell that their key
  // wants.
  for (std::size_t at = (hole + 1) & mask_; cells_[at].block != kNone; at = (at + 1) & mask_) {
    const std::size_t wanted = cells_[at].key & mask_;
    if (((at - wanted) & mask_) >= ((at - hole) & mask_)) {
      cells_[hole] = cells_[at];
      hole = at;
    }
  }
  cells_[hole].block = kNone;
}

void KeyTable::clear() noexcept {
  std::fill(cells_.begin(), cells_.end(), Cell{0, kNone});
}

EngineBlocks::EngineBlocks(std::size_t n, std::size_t block_tokens, bool finds)
    : block_tokens_(block_tokens),
      finds_(finds),
      users_(n),
      keys_(n),
      keyed_(n),
      twin_(n, kNone),
      table_(finds ? n : 0),
      next_(n + 1),
      previous_(n + 1),
      free_count_(n) {
  for (std::size_t i = 0; i <= n; ++i) {
    next_[i] = static_cast<std::uint32_t>(i == n ? 0 : i + 1);
    previous_[i] = static_cast<std::uint32_t>(i == 0 ? n : i - 1);
  }
}

std::size_t EngineBlocks::find(Sequence& sequence, std::size_t known) const {
  assert(known > 0);
  if (!finds_) {
    return 0;
  }
  const std::size_t most = (known - 1) / block_tokens_;
  sequence.derive_keys(most, block_tokens_);
  std::size_t found = 0;
  while (found < most && table_.find(sequence.keys[found]) != kNone) {
    ++found;
  }
  return found;
}

std::ptrdiff_t EngineBlocks::admit(Sequence& sequence, std::size_t known) {
  assert(sequence.blocks.empty());
  std::size_t unused = 0;
  auto& blocks = sequence.blocks;
  const std::size_t found = find(sequence, known);
  for (std::size_t i = 0; i < found; ++i) {
    blocks.push_back(table_.find(sequence.keys[i]));
    unused += users_[blocks.back()] == 0;
  }
  if (blocks_of(known, block_tokens_) - blocks.size() + unused > free_count_) {
    blocks.clear();
    return -1;
  }
  for (const std::uint32_t block : blocks) {
    if (users_[block]++ == 0) {
      unlink(block);
    }
  }
  sequence.stored = blocks.size();
  return static_cast<std::ptrdiff_t>(blocks.size());
}

bool EngineBlocks::reserve(Sequence& sequence, std::size_t tokens,
                           std::vector<std::uint64_t>& removed) {
  auto& blocks = sequence.blocks;
  const std::size_t wanted = blocks_of(tokens, block_tokens_);
  if (wanted > blocks.size() + free_count_) {
    return false;
  }
  while (blocks.size() < wanted) {
    blocks.push_back(take(removed));
  }
  return true;
}

bool EngineBlocks::grow(Sequence& sequence, std::size_t tokens,
                        std::vector<std::uint64_t>& removed) {
  if (!reserve(sequence, tokens, removed)) {
    return false;
  }
  if (finds_) {
    const std::size_t full = tokens / block_tokens_;
    sequence.derive_keys(full, block_tokens_);
    for (; sequence.stored < full; ++sequence.stored) {
      store(sequence.blocks[sequence.stored], sequence.keys[sequence.stored]);
    }
  }
  return true;
}

void EngineBlocks::decode(std::span<Decoder> decoders, std::size_t steps,
                          std::vector<Change>& changes, std::vector<std::uint64_t>& removed) {
  const std::size_t size = block_tokens_;
  const auto first = static_cast<std::ptrdiff_t>(changes.size());
  for (std::size_t number = 0; number < decoders.size(); ++number) {
    // Step s computes token computed + s; the first token of a block opens it, the last fills it.
    const std::size_t at = decoders[number].computed % size;
    for (std::size_t step = (size - at) % size; step < steps && size > 1; step += size) {
      changes.push_back({step, number, 0, 0});
    }
    for (std::size_t step = size - 1 - at; step < steps; step += size) {
      changes.push_back({step, number, 0, 0});
    }
  }
  std::sort(changes.begin() + first, changes.end(), [](const Change& a, const Change& b) {
    return std::tie(a.step, a.number) < std::tie(b.step, b.number);
  });
  for (auto change = changes.begin() + first; change != changes.end(); ++change) {
    const Decoder& decoder = decoders[change->number];
    const std::size_t before = removed.size();
    const std::size_t tokens = decoder.computed + change->step + 1;
    const bool grown = grow(*decoder.sequence, tokens, removed);
    assert(grown);
    static_cast<void>(grown);
    change->removed = removed.size() - before;
    change->full = finds_ && tokens % size == 0 ? tokens / size : 0;
  }
  for (Decoder& decoder : decoders) {
    decoder.computed += steps;
  }
}

bool EngineBlocks::fits(std::span<const Decoder> decoders, std::size_t steps) const noexcept {
  std::size_t needed = 0;
  for (const Decoder& decoder : decoders) {
    const std::size_t tokens = decoder.computed + steps;
    if (tokens > decoder.sequence->tokens.size()) {
      return false;
    }
    const std::size_t wanted = blocks_of(tokens, block_tokens_);
    needed += wanted - std::min(wanted, decoder.sequence->blocks.size());
  }
  return needed <= free_count_;
}

void EngineBlocks::release(Sequence& sequence) {
  const auto head = static_cast<std::uint32_t>(users_.size());
  auto& blocks = sequence.blocks;
  std::vector<std::uint32_t> without_key;
  for (std::size_t i = blocks.size(); i-- > 0;) {
    const std::uint32_t block = blocks[i];
    assert(users_[block] > 0);
    if (--users_[block] != 0) {
      continue;
    }
    if (keyed_[block] != 0) {
      link_before(block, head);
    } else {
      without_key.push_back(block);
    }
  }
  for (std::size_t i = without_key.size(); i-- > 0;) {
    link_before(without_key[i], next_[head]);
  }
  blocks.clear();
  sequence.stored = 0;
}

bool EngineBlocks::clear() {
  if (free_count_ != users_.size()) {
    return false;
  }
  table_.clear();
  std::fill(keyed_.begin(), keyed_.end(), 0);
  std::fill(twin_.begin(), twin_.end(), kNone);
  return true;
}

std::vector<std::uint32_t> EngineBlocks::free_order() const {
  std::vector<std::uint32_t> order;
  for (std::uint32_t block = next_.back(); block != users_.size(); block = next_[block]) {
    order.push_back(block);
  }
  return order;
}

std::uint32_t EngineBlocks::take(std::vector<std::uint64_t>& removed) {
  const std::uint32_t block = next_.back();
  assert(free_count_ > 0);
  unlink(block);
  users_[block] = 1;
  if (keyed_[block] != 0) {
    forget(block);
    removed.push_back(keys_[block]);
  }
  return block;
}

void EngineBlocks::store(std::uint32_t block, std::uint64_t key) {
  assert(users_[block] > 0 && keyed_[block] == 0);
  keys_[block] = key;
  keyed_[block] = 1;
  std::uint32_t last = table_.find(key);
  if (last == kNone) {
    table_.set(key, block);
    return;
  }
  while (twin_[last] != kNone) {
    last = twin_[last];
  }
  twin_[last] = block;
}

void EngineBlocks::forget(std::uint32_t block) {
  const std::uint64_t key = keys_[block];
  std::uint32_t before = table_.find(key);
  if (before != block) {
    while (twin_[before] != block) {
      before = twin_[before];
    }
    twin_[before] = twin_[block];
  } else if (twin_[block] != kNone) {
    table_.set(key, twin_[block]);
  } else {
    table_.erase(key);
  }
  twin_[block] = kNone;
  keyed_[block] = 0;
}

void EngineBlocks::link_before(std::uint32_t block, std::uint32_t next) noexcept {
  const std::uint32_t before = previous_[next];
  next_[before] = previous_[next] = block;
  previous_[block] = before;
  next_[block] = next;
  ++free_count_;
}

void EngineBlocks::unlink(std::uint32_t block) noexcept {
  next_[previous_[block]] = next_[block];
  previous_[next_[block]] = previous_[block];
  --free_count_;
}

}  // namespace kvstrata::sim
