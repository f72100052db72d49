// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/paths.h"

#include <algorithm>
#include <charconv>

namespace kvstrata {

namespace {

constexpr std::string_view kHex = "0123456789abcdef";
constexpr std::size_t kKeyDigits = 2 * std::tuple_size_v<Digest>;

bool is_hex(std::string_view text) noexcept {
  return text.find_first_not_of(kHex) == std::string_view::npos;
}

std::string hex(const Digest& key, std::size_t begin, std::size_t end) {
  std::string text;
  text.reserve(2 * (end - begin));
  for (std::size_t i = begin; i < end; ++i) {
    text += kHex[key[i] >> 4];
    text += kHex[key[i] & 15];
  }
  return text;
}

}  // namespace

bool is_fs_shard(std::string_view name) noexcept {
  return name.size() == 2 && is_hex(name);
}

bool is_fs_part(std::string_view name) noexcept {
  constexpr std::string_view kEnd = ".part";
  if (name.size() < kKeyDigits + 2 + kEnd.size() || !name.ends_with(kEnd)) return false;
  if (!is_hex(name.substr(0, kKeyDigits)) || name[kKeyDigits] != '.') return false;
  const char* const begin = name.data() + kKeyDigits + 1;
  const char* const end = name.data() + name.size() - kEnd.size();
  std::uint64_t number = 0;
  const auto read = std::from_chars(begin, end, number);
  return read.ec == std::errc() && read.ptr == end;
}

std::string fs_server_folder(int number) {
  return "server-" + std::to_string(number);
}

int fs_server_number(std::string_view folder) noexcept {
  for (int number = 0; number < kMaxFsServers; ++number) {
    if (folder == fs_server_folder(number)) return number;
  }
  return -1;
}

bool read_fs_record_name(std::string_view name, Digest* key) noexcept {
  if (name.size() != kKeyDigits + 4 || !name.ends_with(".kvc") ||
      !is_hex(name.substr(0, kKeyDigits)))
    return false;
  for (std::size_t i = 0; i < key->size(); ++i)
    (*key)[i] =
        static_cast<unsigned char>(kHex.find(name[2 * i]) << 4 | kHex.find(name[2 * i + 1]));
  return true;
}

FsPaths::FsPaths(std::string base, const std::string& relative_tmp_dir)
    : base_(std::move(base)),
      tmp_(base_ + "/" + relative_tmp_dir),
      tmp_top_(relative_tmp_dir.substr(0, relative_tmp_dir.find('/'))) {}

std::string FsPaths::outer_folder(const Digest& key) const {
  return base_ + "/" + hex(key, 0, 1);
}

std::string FsPaths::folder(const Digest& key) const {
  return outer_folder(key) + "/" + hex(key, 1, 2);
}

std::string FsPaths::record(const Digest& key) const {
  return folder(key) + "/" + hex(key, 0, key.size()) + ".kvc";
}

std::string FsPaths::part(const Digest& key, std::uint64_t number) const {
  return tmp_ + "/" + hex(key, 0, key.size()) + "." + std::to_string(number) + ".part";
}

bool FsPaths::is_own(std::string_view name) const noexcept {
  return name == ".kvstrata.lock" || name == tmp_top_;
}

}  // namespace kvstrata
