// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The description of a UCX engine, packed into a string that a peer's `connect` takes:
//
//   u32 version (1), sized boot id, sized secret, sized UCX address, u32 regions, and for each
//   region u64 address and a sized key; `sized` is a u32 length and that many bytes. Numbers are
//   in the machine's byte order, because both sides run the same build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvstrata {

// The length of the secret that a request for bytes contains.
inline constexpr std::size_t kUcxSecretBytes = 16;

// A peer, as its UCX engine has described it.
struct UcxPeer {
  std::string address;
  struct Region {
    std::uint64_t address = 0, length = 0;
    std::string key;
  };
  std::vector<Region> regions;
  std::string secret;  // a request with this secret may read the regions
  bool same_host = false;
};

// Reads a packed description. False: `error` says what is wrong with it. `region_bytes` are the
// lengths of the peer's regions, which the metadata around the packed string contains. Neither this
// function nor UCX (ucp_ep_create, ucp_ep_rkey_unpack) checks the contents of the address and the
// keys.
bool read_ucx_peer(const std::string& packed, const std::string& boot_id,
                   std::span<const std::uint64_t> region_bytes, UcxPeer* peer, std::string* error);

// Packs a description for read_ucx_peer().
class UcxPeerPacker {
 public:
  UcxPeerPacker(const std::string& boot_id, const std::string& secret);
  void address(const void* bytes, std::size_t n, std::size_t regions);
  // Called once for each region, in order. REQUIRES: address() was called.
  void region(std::uint64_t address, const void* key, std::size_t key_bytes);
  [[nodiscard]] std::string packed() && { return std::move(packed_); }

 private:
  std::string packed_;
};

}  // namespace kvstrata
