// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "peer.h"

#include <cstring>
#include <string_view>

namespace kvstrata {

namespace {

constexpr std::uint32_t kPeerVersion = 2;

void append(std::string* to, const void* bytes, std::size_t n) {
  to->append(static_cast<const char*>(bytes), n);
}

void append_sized(std::string* to, const std::string& bytes) {
  const auto n = static_cast<std::uint32_t>(bytes.size());
  append(to, &n, sizeof(n));
  append(to, bytes.data(), n);
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}
  template <typename T>
  bool number(T* out) {
    if (left_.size() < sizeof(T)) return false;
    std::memcpy(out, left_.data(), sizeof(T));
    left_.remove_prefix(sizeof(T));
    return true;
  }
  bool sized(std::string* out) {
    std::uint32_t n = 0;
    if (!number(&n) || left_.size() < n) return false;
    out->assign(left_.substr(0, n));
    left_.remove_prefix(n);
    return true;
  }
  bool at_end() const { return left_.empty(); }

 private:
  std::string_view left_;
};

}  // namespace

std::string pack_ucx_peer(const UcxPeer& peer, const std::string& boot_id) {
  std::string packed;
  append(&packed, &kPeerVersion, sizeof(kPeerVersion));
  append_sized(&packed, boot_id);
  append_sized(&packed, peer.secret);
  append_sized(&packed, peer.address);
  append(&packed, &peer.memory, sizeof(peer.memory));
  append_sized(&packed, peer.key);
  return packed;
}

bool read_ucx_peer(const std::string& packed, const std::string& boot_id,
                   std::uint64_t memory_bytes, UcxPeer* peer, std::string* error) {
  Reader reader(packed);
  std::uint32_t version = 0;
  std::string its_boot_id;
  peer->memory_bytes = memory_bytes;
  const bool whole = reader.number(&version) && version == kPeerVersion &&
                     reader.sized(&its_boot_id) && reader.sized(&peer->secret) &&
                     peer->secret.size() == kUcxSecretBytes && reader.sized(&peer->address) &&
                     !peer->address.empty() && reader.number(&peer->memory) &&
                     reader.sized(&peer->key) && !peer->key.empty() && reader.at_end();
  if (!whole) {
    *error = "the description of its UCX engine is cut off, or of another version";
  } else if (memory_bytes > ~std::uint64_t{0} - peer->memory) {
    *error = "memory of " + std::to_string(memory_bytes) + " bytes ends after the last address";
  }
  peer->same_host = !boot_id.empty() && its_boot_id == boot_id;
  return error->empty();
}

}  // namespace kvstrata
