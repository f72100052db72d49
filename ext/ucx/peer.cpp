// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "peer.h"

#include <cstring>
#include <string_view>
#include <utility>

namespace kvstrata {

namespace {

constexpr std::uint32_t kPeerVersion = 1;

void append(std::string* to, const void* bytes, std::size_t n) {
  to->append(static_cast<const char*>(bytes), n);
}

template <typename T>
void append_number(std::string* to, T number) {
  append(to, &number, sizeof(number));
}

void append_sized(std::string* to, const void* bytes, std::size_t n) {
  append_number(to, static_cast<std::uint32_t>(n));
  append(to, bytes, n);
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

UcxPeerPacker::UcxPeerPacker(const std::string& boot_id, const std::string& secret) {
  append_number(&packed_, kPeerVersion);
  append_sized(&packed_, boot_id.data(), boot_id.size());
  append_sized(&packed_, secret.data(), secret.size());
}

void UcxPeerPacker::address(const void* bytes, std::size_t n, std::size_t regions) {
  append_sized(&packed_, bytes, n);
  append_number(&packed_, static_cast<std::uint32_t>(regions));
}

void UcxPeerPacker::region(std::uint64_t address, const void* key, std::size_t key_bytes) {
  append_number(&packed_, address);
  append_sized(&packed_, key, key_bytes);
}

bool read_ucx_peer(const std::string& packed, const std::string& boot_id,
                   std::span<const std::uint64_t> region_bytes, UcxPeer* peer, std::string* error) {
  Reader reader(packed);
  std::uint32_t version = 0, regions = 0;
  std::string its_boot_id;
  bool whole = reader.number(&version) && version == kPeerVersion && reader.sized(&its_boot_id) &&
               reader.sized(&peer->secret) && peer->secret.size() == kUcxSecretBytes &&
               reader.sized(&peer->address) && !peer->address.empty() && reader.number(&regions);
  if (whole && regions != region_bytes.size()) {
    *error = "names " + std::to_string(region_bytes.size()) +
             " regions, but its UCX engine describes " + std::to_string(regions);
    return false;
  }
  for (std::uint32_t i = 0; whole && i < regions; ++i) {
    UcxPeer::Region region;
    region.length = region_bytes[i];
    whole = reader.number(&region.address) && reader.sized(&region.key) && !region.key.empty();
    if (whole && region.length > ~std::uint64_t{0} - region.address) {
      *error = "region " + std::to_string(i) + " of " + std::to_string(region.length) +
               " bytes ends after the last address";
      return false;
    }
    peer->regions.push_back(std::move(region));
  }
  if (!whole || !reader.at_end()) {
    *error = "the description of its UCX engine is cut off, or of another version";
    return false;
  }
  peer->same_host = !boot_id.empty() && its_boot_id == boot_id;
  return true;
}

}  // namespace kvstrata
