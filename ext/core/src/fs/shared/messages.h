// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The messages of the servers that share a directory of `fs`: texts of lines `name value` that end
// with a checksum (docs/formats.md). fs/shared/folder.h has the files that hold them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace kvstrata {

// Totals of one server since it joined.
struct FsTally {
  std::uint64_t stored_bytes = 0;
  std::uint64_t stored_records = 0;
  std::uint64_t removed_bytes = 0;
  std::uint64_t removed_records = 0;
};

// The state that a server publishes.
struct FsSharerState {
  std::string relative_tmp_dir;  // as as_fs_word() writes it
  std::uint64_t capacity_bytes = 0;
  std::uint64_t generation = 0;     // of the last janitor whose file named this server
  std::uint64_t granted_bytes = 0;  // in all, according to the janitors' files that it has read
  std::uint64_t taken_bytes = 0;    // charged for parts so far
  std::uint64_t settled_bytes = 0;  // of these, the bytes of parts that became records
  std::uint64_t wanted_bytes = 0;   // that its puts wait for, beyond the granted bytes
  std::uint64_t space_asks = 0;     // how many times it asked for space on the file system
  std::uint64_t space_bytes = 0;    // how much it asked for the last time
  std::uint64_t scan_asks = 0;      // how many times it asked for a scan
  std::uint64_t left = 0;           // 1: it has ended, and takes no more
  FsTally tally;
};

// The part of a janitor's state that concerns one server.
struct FsGrant {
  std::uint64_t granted_bytes = 0;  // since the server joined
  std::uint64_t space_done = 0;     // number of its last answered request for space (space_asks)
  FsTally seen;                     // the server's tally that used_bytes and records include
};

// The state that a janitor publishes.
struct FsJanitorState {
  std::uint64_t beat = 0;         // how many times it was written
  std::uint64_t left = 0;         // 1: the janitor has left, and the office is free
  std::uint64_t bound_known = 0;  // 1: bound_bytes is known
  std::uint64_t bound_bytes = 0;  // upper bound of records, parts and unused grants together
  std::uint64_t used_bytes = 0;   // approximate charge of all records
  std::uint64_t records = 0;
  std::uint64_t scans = 0;
  std::uint64_t oldest_unix_ns = 0;  // when the record that is evicted next was last used
  std::map<std::uint64_t, FsGrant> grants;
};

// Reads a decimal number without sign or leading zeros, the form that texts and file names use.
bool read_fs_number(std::string_view text, std::uint64_t* out);

// The name without spaces and line ends; different names give different texts.
std::string as_fs_word(const std::string& name);

std::string encode(const FsSharerState& state);
std::string encode(const FsJanitorState& state);
// False: the text is not such a message, or was altered.
[[nodiscard]] bool decode(const std::string& text, FsSharerState* out);
[[nodiscard]] bool decode(const std::string& text, FsJanitorState* out);

}  // namespace kvstrata
