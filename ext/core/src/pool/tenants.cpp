// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/tenants.h"

#include <algorithm>
#include <vector>

namespace kvstrata {

void Tenants::list(std::uint32_t entry) noexcept {
  const auto found = accounts.find(entries.tenant(entry));
  if (found == accounts.end()) return;
  Account& account = found->second;
  EntryLocal* const local = entries.local;
  EntryLocal& listed = local[entry];
  if (listed.is_tail()) {  // the first to leave
    listed.tenant_next = kNoEntry;
    listed.tenant_previous = account.cold;
    if (account.cold != kNoEntry) local[account.cold].tenant_next = entry;
    account.cold = entry;
    if (account.hot == kNoEntry) account.hot = entry;
  } else {
    listed.tenant_previous = kNoEntry;
    listed.tenant_next = account.hot;
    if (account.hot != kNoEntry) local[account.hot].tenant_previous = entry;
    account.hot = entry;
    if (account.cold == kNoEntry) account.cold = entry;
  }
  listed.marks |= kMarkTenantListed;
}

void Tenants::unlist(std::uint32_t entry) noexcept {
  EntryLocal* const local = entries.local;
  EntryLocal& listed = local[entry];
  if ((listed.marks & kMarkTenantListed) == 0) return;
  Account& account = accounts[entries.tenant(entry)];
  if (listed.tenant_previous != kNoEntry) {
    local[listed.tenant_previous].tenant_next = listed.tenant_next;
  } else {
    account.hot = listed.tenant_next;
  }
  if (listed.tenant_next != kNoEntry) {
    local[listed.tenant_next].tenant_previous = listed.tenant_previous;
  } else {
    account.cold = listed.tenant_previous;
  }
  listed.tenant_previous = listed.tenant_next = kNoEntry;
  listed.marks &= static_cast<std::uint8_t>(~kMarkTenantListed);
}

void Tenants::add(std::uint32_t entry) {
  Account& account = accounts[entries.tenant(entry)];
  account.bytes += entries.extent_bytes(entry);
  if (account.quota_bytes >= 0) list(entry);
}

void Tenants::remove(std::uint32_t entry) {
  const std::uint32_t id = entries.tenant(entry);
  Account& account = accounts[id];
  unlist(entry);
  account.bytes -= entries.extent_bytes(entry);
  if (account.bytes == 0 && account.quota_bytes < 0) accounts.erase(id);
}

void Tenants::set_quota(std::uint32_t id, std::int64_t bytes) {
  IndexView& index = entries.index;
  Account& account = accounts[id];
  const bool listed = account.quota_bytes >= 0;
  account.quota_bytes = bytes < 0 ? -1 : bytes;
  if (bytes < 0) {
    while (account.hot != kNoEntry)
      unlist(account.hot);
    if (account.bytes == 0) accounts.erase(id);
  } else if (!listed) {
    std::vector<std::uint32_t> members;
    for (std::uint32_t entry = 0; entry < entries.touched; ++entry) {
      const EntryState state = index.state(entry);
      if (state == EntryState::kFree || state == EntryState::kQuarantined) continue;
      if (load_word(index.cold(entry).tenant) == id) members.push_back(entry);
    }
    std::sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
      return load_word(index.cold(a).stamp) < load_word(index.cold(b).stamp);
    });
    for (const std::uint32_t entry : members)
      list(entry);
  }
}

}  // namespace kvstrata
