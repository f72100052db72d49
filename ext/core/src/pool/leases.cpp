// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/leases.h"

#include <algorithm>
#include <array>
#include <utility>

#include "hash/sha256.h"
#include "pool/index.h"

namespace kvstrata {

namespace {

const std::uint8_t* bytes_of(const Digest* keys) noexcept {
  return reinterpret_cast<const std::uint8_t*>(keys);
}

}  // namespace

ChainKeys::ChainKeys(const Digest& root, std::span<const Digest> chain,
                     std::span<const Digest> slices, std::span<const std::uint32_t> spans,
                     std::size_t max_keys)
    : chain_(chain), bound_(slices.size()), keys_left_(max_keys) {
  bind_slices(root, slices, bound_.data());
  for (std::size_t slice = 0; slice < spans.size(); ++slice)
    if (spans[slice] == 0) whole_slices_.push_back(slice);
}

bool ChainKeys::derive_whole(const IndexView& index, const EntryLocal* local) {
  const std::size_t n_whole = whole_slices_.size();
  if (n_whole != 0 && chain_.size() > keys_left_ / n_whole) return false;
  keys_left_ -= chain_.size() * n_whole;
  const std::size_t n_keys = chain_.size() * n_whole;
  whole_keys_.resize(n_keys);
  guesses_.resize(n_keys);
  std::vector<Digest> bound;
  for (const std::size_t slice : whole_slices_)
    bound.push_back(bound_[slice]);
  const std::uint8_t* const keys = bytes_of(whole_keys_.data());
  const auto guess = [&](std::size_t first, std::size_t end) {
    index.guess_batch(keys + first * kKeyBytes, end - first, guesses_.data() + first, local,
                      sizeof(EntryLocal));
  };
  // While some keys are hashed, the home lines of the keys before them arrive from memory, and the
  // entries of those before that.
  constexpr std::size_t kGroupChunks = 8;
  std::size_t guessed = 0;
  for (std::size_t chunk = 0; chunk < chain_.size(); chunk += kGroupChunks) {
    const std::size_t n = std::min(kGroupChunks, chain_.size() - chunk);
    const std::size_t first = chunk * n_whole;
    bound_keys(chain_.subspan(chunk, n), bound, whole_keys_.data() + first);
    index.prefetch_lines(keys + first * kKeyBytes, n * n_whole);
    guess(guessed, first);
    guessed = first;
  }
  guess(guessed, n_keys);
  return true;
}

bool ChainKeys::derive(std::size_t slice, std::size_t first, std::size_t n, Digest* out) noexcept {
  if (n > keys_left_) return false;
  keys_left_ -= n;
  bound_keys(chain_.subspan(first, n), std::span(&bound_[slice], 1), out);
  return true;
}

Sought::Sought(Entries& entries, const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices)
    : entries_(entries), n_chunks_(n_keys / n_slices), n_slices_(n_slices), found_(entries.found) {
  entries.find(keys, n_keys);
}

Sought::Sought(Entries& entries, ChainKeys& keys)
    : entries_(entries),
      keys_(&keys),
      n_chunks_(keys.n_chunks()),
      n_slices_(keys.n_slices()),
      found_(entries.found) {
  const std::span<const Digest> whole = keys.whole();
  const std::span<const std::size_t> slices = keys.whole_slices();
  found_.assign(keys.guesses().begin(), keys.guesses().end());
  entries.index.confirm_batch(bytes_of(whole.data()), whole.size(), found_.data());
  if (slices.size() == n_slices_) return;
  found_.resize(n_chunks_ * n_slices_, kNotSought);
  // From the last chunk to the first, since each entry moves to a higher place.
  for (std::size_t chunk = n_chunks_; chunk-- > 0;) {
    std::uint32_t* const row = found_.data() + chunk * n_slices_;
    const std::uint32_t* const from = found_.data() + chunk * slices.size();
    std::size_t slice = n_slices_;
    for (std::size_t i = slices.size(); i-- > 0;) {
      const std::uint32_t entry = from[i];
      while (--slice > slices[i])
        row[slice] = kNotSought;
      row[slice] = entry;
    }
    while (slice-- > 0)
      row[slice] = kNotSought;
  }
}

std::uint32_t Sought::seek(std::size_t chunk, std::size_t slice) {
  const std::size_t first = chunk / kPiece * kPiece;
  const std::size_t n = std::min(kPiece, n_chunks_ - first);
  std::array<Digest, kPiece> keys;
  if (exceeded_ || !keys_->derive(slice, first, n, keys.data())) {
    exceeded_ = true;
    return kNoEntry;
  }
  std::array<std::uint32_t, kPiece> found;
  entries_.index.find_batch(bytes_of(keys.data()), n, found.data(), entries_.local,
                            sizeof(EntryLocal));
  for (std::size_t i = 0; i < n; ++i)
    found_[(first + i) * n_slices_ + slice] = found[i];
  return found[chunk - first];
}

namespace {

// Whether a hit of `n_chunks` chunks needs chunk `chunk` of a slice with this span.
bool is_needed(std::uint32_t span, std::size_t chunk, std::size_t n_chunks) noexcept {
  return span == 0 || chunk + span >= n_chunks;
}

}  // namespace

void Leases::take(Sought& sought, std::span<const std::uint32_t> spans, const RowMask& holders,
                  const std::uint8_t* identity, bool again, bool unread, std::size_t own_chunks,
                  LeaseResult* result) {
  const std::size_t n_slices = spans.size();
  IndexView& index = entries.index;
  EntryLocal* const local = entries.local;
  std::uint64_t bytes = leased_bytes;
  std::uint64_t prefix_bytes = 0;
  std::size_t n_chunks = 0;
  bool readable = true;
  bool trimmed = false;
  const bool room = leases.size() < kMaxLeaseTickets;
  for (std::size_t chunk = 0; chunk < sought.n_chunks(); ++chunk) {
    std::uint64_t chunk_bytes = 0;
    std::uint64_t more = 0;
    std::uint64_t unverified = 0;
    bool present = true;
    for (std::size_t slice = 0; slice < n_slices && present; ++slice) {
      if (spans[slice] != 0) continue;
      const std::uint32_t entry = sought.at(chunk, slice);
      const EntryState state = entry == kNoEntry ? EntryState::kFree : index.state(entry);
      present = state == EntryState::kReady || state == EntryState::kUnverified;
      present = present && entries.is_of(entry, identity);
      if (!present) break;
      unverified += state == EntryState::kUnverified;
      chunk_bytes += entries.extent_bytes(entry);
      if (local[entry].leases == 0) more += entries.extent_bytes(entry);
    }
    if (!present || (trimmed && unverified != 0)) break;
    readable &= unread || unverified == 0;
    result->unverified += unverified;
    if (!readable) continue;
    if (!room) break;
    // Beyond the bound nothing is leased, but the bytes of the rest of the prefix are counted.
    trimmed |= bytes + more > limit_bytes;
    bytes += more;
    prefix_bytes += chunk_bytes;
    n_chunks += trimmed ? 0 : 1;
  }
  if (trimmed) {
    // A prefix longer than the bound needs all bytes of the other leases, and no more than those.
    result->short_bytes = bytes - std::min(bytes, std::max(limit_bytes, prefix_bytes));
  }
  const bool windows = std::any_of(spans.begin(), spans.end(), [](auto span) { return span != 0; });
  if (windows) {
    n_chunks = longest_windows(n_chunks, spans, [&](std::size_t chunk, std::size_t slice) {
      const std::uint32_t entry = sought.at(chunk, slice);
      if (entry == kNoEntry || !entries.is_of(entry, identity)) return false;
      result->unverified += index.state(entry) == EntryState::kUnverified;
      return index.state(entry) == EntryState::kReady ||
             (unread && index.state(entry) == EntryState::kUnverified);
    });
    n_chunks = within_bound(sought, spans, identity, n_chunks, &trimmed, result);
  }
  if (sought.exceeded()) {
    *result = LeaseResult{};
    result->exceeded = true;
    return;
  }
  counts.leases_trimmed += trimmed ? 1 : 0;
  const std::size_t n_items = n_chunks * n_slices;
  if (n_items == 0 ||
      items + n_items > 4 * std::max<std::size_t>(index.capacity(), kMaxBatchKeys)) {
    return;
  }
  const RowBits bits = holders.bits();
  result->extents.resize(n_items);
  Lease lease{holders, {}};
  lease.entries.reserve(n_items);
  for (std::size_t chunk = n_chunks; chunk-- > 0;) {
    // From the last chunk to the first: the start of a prompt is the newest, and evicted last.
    for (std::size_t slice = n_slices; slice-- > 0;) {
      if (windows && !is_needed(spans[slice], chunk, n_chunks)) continue;
      const std::uint32_t entry = sought.at(chunk, slice);
      if (local[entry].leases == 0) leased_bytes += entries.extent_bytes(entry);
      entries.change_blockers(entry, false, [](EntryLocal& changed) { changed.leases += 1; });
      RowBits present = rows.rows_of(entry);
      present |= bits;
      rows.set_rows(entry, present);
      if (chunk >= own_chunks) {
        entries.touch(entry, again);
      } else {
        lease.unused += 1;
      }
      result->extents[chunk * n_slices + slice] = entries.extent_record(entry);
      lease.entries.push_back(entry);
    }
  }
  for (std::size_t slice = 0; slice < n_slices && own_chunks == 0; ++slice) {
    if (windows && !is_needed(spans[slice], 0, n_chunks)) continue;
    departures.family.each_ancestor(sought.at(0, slice),
                                    [&](std::uint32_t up) { entries.touch(up, again); });
  }
  std::reverse(lease.entries.begin(), lease.entries.end());
  items += lease.entries.size();
  result->n_chunks = n_chunks;
  result->ticket = next_ticket++;
  leases.emplace(result->ticket, std::move(lease));
}

std::size_t Leases::within_bound(Sought& sought, std::span<const std::uint32_t> spans,
                                 const std::uint8_t* identity, std::size_t n_chunks, bool* trimmed,
                                 LeaseResult* result) {
  const std::size_t n_slices = spans.size();
  std::uint64_t bytes = leased_bytes;
  std::uint64_t hit_bytes = 0;
  for (std::size_t slice = 0; slice < n_slices; ++slice) {
    const std::size_t count =
        spans[slice] == 0 ? n_chunks : std::min<std::size_t>(n_chunks, spans[slice]);
    for (std::size_t chunk = n_chunks - count; chunk < n_chunks; ++chunk) {
      const std::uint32_t entry = sought.at(chunk, slice);
      hit_bytes += entries.extent_bytes(entry);
      if (entries.local[entry].leases == 0) bytes += entries.extent_bytes(entry);
    }
  }
  if (bytes <= limit_bytes) return n_chunks;
  *trimmed = true;
  result->short_bytes += bytes - std::min(bytes, std::max(limit_bytes, hit_bytes));
  // What the chunks before a chunk have, in one slice.
  struct Before {
    std::size_t present = 0;  // how many of the last of them are present
    std::uint64_t bytes = 0;  // of those that are present and have no lease
  };
  std::vector<Before> before((n_chunks + 1) * n_slices);
  for (std::size_t i = 0; i < n_chunks * n_slices; ++i) {
    const std::uint32_t entry = sought.at(i / n_slices, i % n_slices);
    const bool present = entry != kNoEntry && entries.index.state(entry) == EntryState::kReady &&
                         entries.is_of(entry, identity);
    const bool adds = present && entries.local[entry].leases == 0;
    before[i + n_slices] = {present ? before[i].present + 1 : 0,
                            before[i].bytes + (adds ? entries.extent_bytes(entry) : 0)};
  }
  const auto fits = [&](std::size_t n) {
    std::uint64_t sum = leased_bytes;
    for (std::size_t slice = 0; slice < n_slices; ++slice) {
      const std::size_t count = spans[slice] == 0 ? n : std::min<std::size_t>(n, spans[slice]);
      const Before& end = before[n * n_slices + slice];
      if (end.present < count) return false;
      sum += end.bytes - before[(n - count) * n_slices + slice].bytes;
    }
    return sum <= limit_bytes;
  };
  while (n_chunks != 0 && !fits(n_chunks))
    --n_chunks;
  return n_chunks;
}

std::size_t Leases::to_end(std::span<const std::uint64_t> tickets, std::uint64_t need_bytes) {
  // Ends the leases only in the entries' counts, and restores the counts below. Nobody sees the
  // counts in between, because the mutex is held.
  std::uint64_t freed_bytes = 0;
  std::size_t looked_at = 0;
  std::size_t count = 0;
  std::size_t useful = 0;
  while (count < tickets.size() && freed_bytes < need_bytes && looked_at < kMaxEntriesToEnd) {
    const auto lease = leases.find(tickets[count++]);
    if (lease == leases.end()) continue;
    for (const std::uint32_t entry : lease->second.entries) {
      EntryLocal& leased = entries.local[entry];
      leased.leases -= 1;
      if (leased.leases != 0) continue;
      freed_bytes += entries.extent_bytes(entry);
      useful = count;
    }
    looked_at += lease->second.entries.size();
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto lease = leases.find(tickets[i]);
    if (lease == leases.end()) continue;
    for (const std::uint32_t entry : lease->second.entries)
      entries.local[entry].leases += 1;
  }
  // If kMaxEntriesToEnd stopped the search, all leases up to there count: the caller's next search
  // begins after them.
  return looked_at < kMaxEntriesToEnd ? useful : count;
}

void Leases::end(Iterator lease) {
  const std::vector<std::uint32_t>& leased = lease->second.entries;
  EntryLocal* const local = entries.local;
  for (std::size_t i = leased.size(); i-- > 0;) {
    const std::uint32_t entry = leased[i];
    if (i >= 8) __builtin_prefetch(&local[leased[i - 8]], 1);
    if (i >= 8) __builtin_prefetch(&entries.index.cold(leased[i - 8]), 1);
    if (local[entry].leases == 1) {
      leased_bytes -= entries.extent_bytes(entry);
      rows.set_rows(entry, rows.old_rows_of(entry));
    }
    entries.change_blockers(entry, i >= lease->second.unused,
                            [](EntryLocal& changed) { changed.leases -= 1; });
    if (local[entry].leases == 0) departures.settle(entry);
  }
  items -= leased.size();
  leases.erase(lease);
}

bool Leases::release(std::uint64_t ticket, std::int64_t row) {
  const auto lease = leases.find(ticket);
  if (lease == leases.end()) return false;
  if (row >= 0) {
    if (row >= kRowCount || !lease->second.rows.test(static_cast<std::uint32_t>(row))) return false;
    lease->second.rows.clear(static_cast<std::uint32_t>(row));
    if (lease->second.rows.any()) return true;
  }
  end(lease);
  return true;
}

void Leases::end_row(std::uint32_t row) {
  for (auto lease = leases.begin(); lease != leases.end();) {
    const auto next = std::next(lease);
    if (lease->second.rows.test(row)) {
      lease->second.rows.clear(row);
      if (!lease->second.rows.any()) end(lease);
    }
    lease = next;
  }
}

}  // namespace kvstrata
