// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The KV blocks of a simulated engine: which are free, which can be found, which goes next.
//
// 1. Every block is free or has users, never both.
// 2. A free block with a key can still be found until it is taken for something else; the least
//    recently freed goes first. Free blocks without a key go before all others.
// 3. A key may lie in several blocks ("twins"), when requests with one prefix were computed at
// once.
//    The block that was stored first is found.
//
// Not for use by several threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvstrata::sim {

// What one request has in an engine: the keys of its full blocks and the blocks that it uses.
struct Sequence {
  std::span<const std::uint32_t> tokens;  // must outlive the object
  std::uint64_t root = 0;                 // what the first key depends on besides tokens
  std::vector<std::uint64_t> keys{};
  std::vector<std::uint32_t> blocks{};
  std::size_t stored = 0;  // of `blocks`, how many can be found

  // Derives the keys of the first `n` blocks. REQUIRES: so many are full, and `block_tokens` is the
  // same in every call.
  void derive_keys(std::size_t n, std::size_t block_tokens);
};

// A block that was opened or became full in a decode step.
struct Change {
  std::size_t step;
  std::size_t number;   // of the sequence
  std::size_t full;     // how many blocks of the sequence are full if another one is now, else 0
  std::size_t removed;  // how many keys were removed for it
};

// A sequence that gets one token in each step.
struct Decoder {
  Sequence* sequence;
  std::size_t computed;  // tokens
};

// Keys to blocks, by open addressing: at most half of the cells are in use.
class KeyTable {
 public:
  explicit KeyTable(std::size_t keys);
  // The block of a key, kNone without one.
  std::uint32_t find(std::uint64_t key) const noexcept;
  // REQUIRES: there are fewer keys than the table was made for.
  void set(std::uint64_t key, std::uint32_t block) noexcept;
  void erase(std::uint64_t key) noexcept;
  void clear() noexcept;

  static constexpr std::uint32_t kNone = UINT32_MAX;

 private:
  struct Cell {
    std::uint64_t key;
    std::uint32_t block;
  };
  std::size_t cell_of(std::uint64_t key) const noexcept;
  std::vector<Cell> cells_;
  std::size_t mask_;
};

class EngineBlocks {
 public:
  // `finds` is false for an engine without prefix caching. REQUIRES: n < 2^31, block_tokens > 0.
  EngineBlocks(std::size_t n, std::size_t block_tokens, bool finds);

  std::size_t count() const noexcept { return users_.size(); }
  std::size_t free() const noexcept { return free_count_; }

  // Gives a sequence without blocks the longest prefix of its first `known` tokens that is there,
  // but not the block of the last token. Returns how many blocks that were, or -1, with nothing
  // changed, if the free blocks would not suffice for the known tokens.
  std::ptrdiff_t admit(Sequence& sequence, std::size_t known);
  // How many blocks `admit` would find now. Changes nothing but the sequence's keys.
  std::size_t find(Sequence& sequence, std::size_t known) const;

  // Gives a sequence blocks for its first `tokens` tokens, without letting more of them be found.
  // Appends the keys that were removed for it. False, with nothing changed, if too few are free.
  bool reserve(Sequence& sequence, std::size_t tokens, std::vector<std::uint64_t>& removed);

  // As `reserve`, and lets the blocks that these tokens fill be found.
  bool grow(Sequence& sequence, std::size_t tokens, std::vector<std::uint64_t>& removed);

  // Grows each sequence by `steps` tokens, as steps of one token each would, one after the other.
  // REQUIRES: `fits(decoders, steps)`.
  void decode(std::span<Decoder> decoders, std::size_t steps, std::vector<Change>& changes,
              std::vector<std::uint64_t>& removed);
  // Whether the sequences have the tokens and the free blocks suffice for so many steps.
  bool fits(std::span<const Decoder> decoders, std::size_t steps) const noexcept;

  // Takes all blocks from a sequence; the last is evicted first.
  void release(Sequence& sequence);

  // Forgets every key. False, with nothing changed, while a block has users.
  bool clear();

  // The state, for checks: users and keys by block, and whether it has a key.
  std::span<const std::uint32_t> users() const noexcept { return users_; }
  std::uint64_t key(std::size_t block) const noexcept { return keys_[block]; }
  bool keyed(std::size_t block) const noexcept { return keyed_[block] != 0; }
  std::vector<std::uint32_t> free_order() const;
  std::uint32_t found(std::uint64_t key) const noexcept { return table_.find(key); }

 private:
  std::uint32_t take(std::vector<std::uint64_t>& removed);
  void store(std::uint32_t block, std::uint64_t key);
  void forget(std::uint32_t block);
  void link_before(std::uint32_t block, std::uint32_t next) noexcept;
  void unlink(std::uint32_t block) noexcept;

  std::size_t block_tokens_;
  bool finds_;
  std::vector<std::uint32_t> users_;
  std::vector<std::uint64_t> keys_;
  std::vector<unsigned char> keyed_;
  std::vector<std::uint32_t> twin_;  // by block, the one with its key that was stored next
  KeyTable table_;
  // The free blocks as a ring in the order in which they are taken; its head is element count().
  std::vector<std::uint32_t> next_, previous_;
  std::size_t free_count_;
};

}  // namespace kvstrata::sim
