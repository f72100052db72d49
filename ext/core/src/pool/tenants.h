// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// How many bytes each tenant has in the pool, its quota, and, for tenants with a quota only, the
// list of its entries by age, so that a tenant over its quota can make room from its own.
//
// Keeps: a tenant's bytes are those of its linked entries. Its list holds all of them exactly while
// it has a quota. A tenant with neither bytes nor quota has no account.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "pool/entries.h"

namespace kvstrata {

struct Tenants {
  struct Account {
    std::uint64_t bytes = 0;
    std::int64_t quota_bytes = -1;  // -1: none
    std::uint32_t hot = kNoEntry;   // the newest entry of the list
    std::uint32_t cold = kNoEntry;
  };

  // The entries must outlive the object.
  explicit Tenants(Entries& entries) noexcept : entries(entries) {}

  // Adds a linked entry to its tenant's account (before it is in the index), or takes it out.
  void add(std::uint32_t entry);
  void remove(std::uint32_t entry);
  // The entry was used: makes it the newest of its tenant's list.
  void touch(std::uint32_t entry) noexcept {
    if ((entries.local[entry].marks & kMarkTenantListed) == 0) return;
    unlist(entry);
    list(entry);
  }
  // -1 ends the quota. Evicts nothing.
  void set_quota(std::uint32_t tenant, std::int64_t bytes);

  void list(std::uint32_t entry) noexcept;
  void unlist(std::uint32_t entry) noexcept;

  Entries& entries;
  std::unordered_map<std::uint32_t, Account> accounts;
};

}  // namespace kvstrata
