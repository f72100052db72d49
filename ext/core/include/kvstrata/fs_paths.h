// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Names on the medium of `fs`:
//
//   <base>/<2 hex>/<2 hex>/<64 hex>.kvc      a record, byte for byte as it lies in L1
//   <base>/<tmp>/<64 hex>.<number>.part      a record being written, removed at a later start
//   <base>/.kvstrata.lock                    lock of the server that owns the directory, or of
//                                            those that share it
//   <base>/.kvstrata.shared/                 what those that share it tell each other
//   (fs_shared_files.h)
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvstrata/digest.h"
#include "kvstrata/files.h"

namespace kvstrata {

// The shortest record there can be: one header page and one byte.
inline constexpr std::uint64_t kMinRecordBytes = kFileBlockBytes + 1;

// What a file of this length counts against the cap.
constexpr std::uint64_t fs_charge(std::uint64_t length) noexcept {
  return (length + kFileBlockBytes - 1) / kFileBlockBytes * kFileBlockBytes;
}

bool is_fs_shard(std::string_view name) noexcept;  // two hex digits
// The number that a part of this name has.
bool read_fs_part_name(std::string_view name, std::uint64_t* number) noexcept;
// The key that a record of this name has.
bool read_fs_record_name(std::string_view name, Digest* key) noexcept;

class FsPaths {
 public:
  FsPaths(std::string base, const std::string& relative_tmp_dir);

  [[nodiscard]] const std::string& base() const noexcept { return base_; }
  [[nodiscard]] const std::string& tmp() const noexcept { return tmp_; }
  [[nodiscard]] std::string lock() const { return base_ + "/.kvstrata.lock"; }
  [[nodiscard]] std::string shared() const { return base_ + "/.kvstrata.shared"; }
  // <base>/<2 hex> and <base>/<2 hex>/<2 hex> of a key.
  [[nodiscard]] std::string outer_folder(const Digest& key) const;
  [[nodiscard]] std::string folder(const Digest& key) const;
  [[nodiscard]] std::string record(const Digest& key) const;
  [[nodiscard]] std::string part(const Digest& key, std::uint64_t number) const;
  // Whether an entry of `base` that is no shard is one of ours.
  [[nodiscard]] bool is_own(std::string_view name) const noexcept;

 private:
  std::string base_;
  std::string tmp_;
  std::string tmp_top_;
};

}  // namespace kvstrata
