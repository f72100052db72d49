// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The description of a UCX engine, packed into a string that a peer's `connect` takes:
//
//   u32 version (2), sized boot id, sized secret, sized UCX address, u64 address of
//   its memory and the sized key of it; `sized` is a u32 length and that many bytes. Numbers are in
//   the machine's byte order, because both sides run the same build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvstrata {

// The length of the secret that a request for bytes contains.
inline constexpr std::size_t kUcxSecretBytes = 16;

// A peer, as its UCX engine has described it.
struct UcxPeer {
  std::string address;
  std::uint64_t memory = 0, memory_bytes = 0;  // the address of what peers may read, and its length
  std::string key;
  std::string secret;  // a request with this secret may read the memory
  bool same_host = false;
};

// Reads a packed description. False: `error` says what is wrong with it. `memory_bytes` is the
// length of the peer's memory, which the metadata around the packed string contains. Neither this
// function nor UCX (ucp_ep_create, ucp_ep_rkey_unpack) checks the contents of the address and the
// key.
bool read_ucx_peer(const std::string& packed, const std::string& boot_id,
                   std::uint64_t memory_bytes, UcxPeer* peer, std::string* error);

// Packs a description for read_ucx_peer(), which says whether both are on one host.
[[nodiscard]] std::string pack_ucx_peer(const UcxPeer& peer, const std::string& boot_id);

}  // namespace kvstrata
