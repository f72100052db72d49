// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Names on the medium of `fs`:
//
//   <base>/<2 hex>/<2 hex>/<64 hex>.kvc      a record, byte for byte as it lies in L1
//   <base>/<tmp>/<64 hex>.<number>.part      a record that is being written; leftovers are removed
//                                            at a later start
//   <base>/.kvstrata.lock                    lock of the server that owns the directory
//
// In a directory that servers share, <base> is <base_path>/server-<number>: each server writes in a
// folder of its own and reads those of the others (fs/others.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "files/block.h"
#include "kvstrata/digest.h"

namespace kvstrata {

// Maximum number of servers that share a directory.
inline constexpr int kMaxFsServers = 64;

// The shortest possible record: one header page and one byte.
inline constexpr std::uint64_t kMinRecordBytes = kFileBlockBytes + 1;

// The bytes by which a file of this length counts against the cap.
constexpr std::uint64_t fs_charge(std::uint64_t length) noexcept {
  return whole_blocks(length);
}

bool is_fs_shard(std::string_view name) noexcept;  // two hex digits
bool is_fs_part(std::string_view name) noexcept;
// The name of a server's folder in a shared directory, and its number, or -1 for another name.
std::string fs_server_folder(int number);
int fs_server_number(std::string_view folder) noexcept;
// Reads the record's key from its name. False: this is not the name of a record.
bool read_fs_record_name(std::string_view name, Digest* key) noexcept;

class FsPaths {
 public:
  FsPaths(std::string base, const std::string& relative_tmp_dir);

  [[nodiscard]] const std::string& base() const noexcept { return base_; }
  [[nodiscard]] const std::string& tmp() const noexcept { return tmp_; }
  [[nodiscard]] std::string lock() const { return base_ + "/.kvstrata.lock"; }
  // <base>/<2 hex> and <base>/<2 hex>/<2 hex> of a key.
  [[nodiscard]] std::string outer_folder(const Digest& key) const;
  [[nodiscard]] std::string folder(const Digest& key) const;
  [[nodiscard]] std::string record(const Digest& key) const;
  [[nodiscard]] std::string part(const Digest& key, std::uint64_t number) const;
  // Whether this entry of `base` belongs to kvstrata. REQUIRES: the entry is not a shard.
  [[nodiscard]] bool is_own(std::string_view name) const noexcept;

 private:
  std::string base_;
  std::string tmp_;
  std::string tmp_top_;
};

}  // namespace kvstrata
