// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/shared/messages.h"

#include <charconv>
#include <set>
#include <string_view>
#include <utility>

#include "hash/crc32c.h"

namespace kvstrata {

namespace {

constexpr std::string_view kSharerTitle = "kvstrata-fs-member 1";
constexpr std::string_view kJanitorTitle = "kvstrata-fs-janitor 1";

// The fields of each message in their order, for both the Writer and the Reader.
template <typename Tally, typename Do>
void each_field(Tally& tally, const Do& with, const std::string& before = "") {
  with(before + "stored_bytes", tally.stored_bytes);
  with(before + "stored_records", tally.stored_records);
  with(before + "removed_bytes", tally.removed_bytes);
  with(before + "removed_records", tally.removed_records);
}

template <typename State, typename Do>
void each_sharer_field(State& state, const Do& with) {
  with("capacity_bytes", state.capacity_bytes);
  with("generation", state.generation);
  with("granted_bytes", state.granted_bytes);
  with("taken_bytes", state.taken_bytes);
  with("settled_bytes", state.settled_bytes);
  with("wanted_bytes", state.wanted_bytes);
  with("space_asks", state.space_asks);
  with("space_bytes", state.space_bytes);
  with("scan_asks", state.scan_asks);
  with("left", state.left);
  each_field(state.tally, with);
}

template <typename State, typename Do>
void each_janitor_field(State& state, const Do& with) {
  with("beat", state.beat);
  with("left", state.left);
  with("bound_known", state.bound_known);
  with("bound_bytes", state.bound_bytes);
  with("used_bytes", state.used_bytes);
  with("records", state.records);
  with("scans", state.scans);
  with("oldest_unix_ns", state.oldest_unix_ns);
}

template <typename Grant, typename Do>
void each_grant_field(Grant& grant, std::uint64_t id, const Do& with) {
  const std::string before = "member." + std::to_string(id) + ".";
  with(before + "granted_bytes", grant.granted_bytes);
  with(before + "space_done", grant.space_done);
  each_field(grant.seen, with, before);
}

class Writer {
 public:
  explicit Writer(std::string_view title) : text_(std::string(title) + "\n") {}
  void operator()(const std::string& name, std::uint64_t value) const {
    text_ += name + " " + std::to_string(value) + "\n";
  }
  void word(const std::string& name, const std::string& value) const {
    text_ += name + " " + value + "\n";
  }
  std::string finish() {
    text_ += "crc32c " + std::to_string(crc32c(text_.data(), text_.size())) + "\n";
    return std::move(text_);
  }

 private:
  mutable std::string text_;
};

// Checks a message and reads its lines by name. Of several lines with one name the first line
// counts.
class Reader {
 public:
  bool open(std::string_view text, std::string_view title) {
    const std::size_t end = text.rfind("crc32c ");
    std::uint64_t crc = 0;
    if (!text.ends_with('\n') || end == std::string_view::npos ||
        !read_fs_number(text.substr(end + 7, text.size() - end - 8), &crc) ||
        crc != crc32c(text.data(), end))
      return false;
    text = text.substr(0, end);
    if (!text.starts_with(title) || text[title.size()] != '\n') return false;
    text.remove_prefix(title.size() + 1);
    while (!text.empty()) {
      const std::size_t line = text.find('\n');
      const std::size_t space = text.find(' ');
      if (line == std::string_view::npos || space > line) return false;
      lines_.emplace(text.substr(0, space), text.substr(space + 1, line - space - 1));
      text.remove_prefix(line + 1);
    }
    return true;
  }
  void operator()(const std::string& name, std::uint64_t& value) const {
    std::string text;
    word(name, &text);
    good_ = good_ && read_fs_number(text, &value);
  }
  void word(const std::string& name, std::string* value) const {
    const auto found = lines_.find(name);
    good_ = good_ && found != lines_.end();
    if (found != lines_.end()) *value = found->second;
  }
  [[nodiscard]] std::set<std::uint64_t> sharer_numbers() const {
    std::set<std::uint64_t> found;
    for (auto line = lines_.lower_bound("member."); line != lines_.end(); ++line) {
      const std::string_view name = line->first;
      std::uint64_t id = 0;
      if (!name.starts_with("member.")) break;
      if (read_fs_number(name.substr(7, name.find('.', 7) - 7), &id)) found.insert(id);
    }
    return found;
  }
  [[nodiscard]] bool good() const { return good_; }

 private:
  std::map<std::string, std::string> lines_;
  mutable bool good_ = true;
};

}  // namespace

bool read_fs_number(std::string_view text, std::uint64_t* out) {
  if (text.empty() || (text.size() > 1 && text[0] == '0')) return false;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), *out);
  return read.ec == std::errc() && read.ptr == text.data() + text.size();
}

std::string as_fs_word(const std::string& name) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text;
  for (const char byte : name) {
    const auto code = static_cast<unsigned char>(byte);
    if (code > ' ' && code < 0x7f && byte != '%')
      text += byte;
    else
      text += {'%', kHex[code >> 4], kHex[code & 15]};
  }
  return text;
}

std::string encode(const FsSharerState& state) {
  Writer writer(kSharerTitle);
  writer.word("relative_tmp_dir", state.relative_tmp_dir);
  each_sharer_field(state, writer);
  return writer.finish();
}

std::string encode(const FsJanitorState& state) {
  Writer writer(kJanitorTitle);
  each_janitor_field(state, writer);
  for (const auto& [id, grant] : state.grants)
    each_grant_field(grant, id, writer);
  return writer.finish();
}

bool decode(const std::string& text, FsSharerState* out) {
  Reader reader;
  if (!reader.open(text, kSharerTitle)) return false;
  reader.word("relative_tmp_dir", &out->relative_tmp_dir);
  each_sharer_field(*out, reader);
  return reader.good();
}

bool decode(const std::string& text, FsJanitorState* out) {
  Reader reader;
  if (!reader.open(text, kJanitorTitle)) return false;
  each_janitor_field(*out, reader);
  out->grants.clear();
  for (const std::uint64_t id : reader.sharer_numbers())
    each_grant_field(out->grants[id], id, reader);
  return reader.good();
}

}  // namespace kvstrata
