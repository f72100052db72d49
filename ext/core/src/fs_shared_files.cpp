// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/fs_shared_files.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <set>
#include <string_view>
#include <utility>

#include "kvstrata/crc32c.h"
#include "kvstrata/fs_files.h"

namespace kvstrata {

namespace {

constexpr std::string_view kMemberTitle = "kvstrata-fs-member 1";
constexpr std::string_view kJanitorTitle = "kvstrata-fs-janitor 1";
constexpr std::uint64_t kMaxBytes = 1 << 20;
// Longer numbers in names are nobody's: the next one must be there.
constexpr std::size_t kMaxDigits = 15;

// What both states are made of; the order is that of the file.
template <typename Tally, typename Do>
void each_field(Tally& tally, const Do& with, const std::string& before = "") {
  with(before + "stored_bytes", tally.stored_bytes);
  with(before + "stored_records", tally.stored_records);
  with(before + "removed_bytes", tally.removed_bytes);
  with(before + "removed_records", tally.removed_records);
}

template <typename State, typename Do>
void each_member_field(State& state, const Do& with) {
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

bool read_number(std::string_view text, std::uint64_t* out) {
  if (text.empty() || (text.size() > 1 && text[0] == '0')) return false;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), *out);
  return read.ec == std::errc() && read.ptr == text.data() + text.size();
}

// The lines below the title by name, or false. Each one is taken once.
class Reader {
 public:
  bool open(std::string_view text, std::string_view title) {
    const std::size_t end = text.rfind("crc32c ");
    std::uint64_t crc = 0;
    if (!text.ends_with('\n') || end == std::string_view::npos ||
        !read_number(text.substr(end + 7, text.size() - end - 8), &crc) ||
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
    good_ = good_ && read_number(text, &value);
  }
  void word(const std::string& name, std::string* value) const {
    const auto found = lines_.find(name);
    good_ = good_ && found != lines_.end();
    if (found != lines_.end()) *value = found->second;
  }
  [[nodiscard]] std::set<std::uint64_t> member_numbers() const {
    std::set<std::uint64_t> found;
    for (auto line = lines_.lower_bound("member."); line != lines_.end(); ++line) {
      const std::string_view name = line->first;
      std::uint64_t id = 0;
      if (!name.starts_with("member.")) break;
      if (read_number(name.substr(7, name.find('.', 7) - 7), &id)) found.insert(id);
    }
    return found;
  }
  [[nodiscard]] bool good() const { return good_; }

 private:
  std::map<std::string, std::string> lines_;
  mutable bool good_ = true;
};

}  // namespace

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

std::string encode(const FsMemberState& state) {
  Writer writer(kMemberTitle);
  writer.word("relative_tmp_dir", state.relative_tmp_dir);
  each_member_field(state, writer);
  return writer.finish();
}

std::string encode(const FsJanitorState& state) {
  Writer writer(kJanitorTitle);
  each_janitor_field(state, writer);
  for (const auto& [id, grant] : state.grants)
    each_grant_field(grant, id, writer);
  return writer.finish();
}

bool decode(const std::string& text, FsMemberState* out) {
  Reader reader;
  if (!reader.open(text, kMemberTitle)) return false;
  reader.word("relative_tmp_dir", &out->relative_tmp_dir);
  each_member_field(*out, reader);
  return reader.good();
}

bool decode(const std::string& text, FsJanitorState* out) {
  Reader reader;
  if (!reader.open(text, kJanitorTitle)) return false;
  each_janitor_field(*out, reader);
  out->grants.clear();
  for (const std::uint64_t id : reader.member_numbers())
    each_grant_field(out->grants[id], id, reader);
  return reader.good();
}

std::string FsSharedFiles::path(const char* what, std::uint64_t number) const {
  return folder_ + "/" + what + "." + std::to_string(number);
}

Status FsSharedFiles::make_folder() {
  const Status status = layer_.make_folder(folder_);
  return is_os_error(status, EEXIST) ? Status() : status;
}

Status FsSharedFiles::list(Listing* out) {
  *out = {};
  std::vector<FolderEntry> entries;
  KVSTRATA_RETURN_IF_ERROR(layer_.list(folder_, &entries));
  for (const FolderEntry& entry : entries) {
    const std::string_view name = entry.name;
    const std::size_t dot = name.find('.');
    const std::string_view what = name.substr(0, dot);
    std::uint64_t number = 0;
    std::vector<std::uint64_t>* const group = what == "lock"      ? &out->locks
                                              : what == "member"  ? &out->members
                                              : what == "janitor" ? &out->janitors
                                                                  : nullptr;
    if (what == "temp") continue;
    if (group != nullptr && dot != std::string_view::npos && name.size() - dot - 1 <= kMaxDigits &&
        entry.is_file && read_number(name.substr(dot + 1), &number) && number > 0)
      group->push_back(number);
    else
      out->foreign += 1;
  }
  for (auto* const group : {&out->locks, &out->members, &out->janitors})
    std::ranges::sort(*group);
  return Status();
}

Status FsSharedFiles::lock(std::uint64_t id, std::unique_ptr<FileLock>* out, std::string* holder) {
  return layer_.lock(path("lock", id), out, holder);
}

Status FsSharedFiles::read(const std::string& path, std::string* text) {
  std::unique_ptr<File> file;
  std::uint64_t length = 0;
  KVSTRATA_RETURN_IF_ERROR(layer_.open(path, FileMode::kRead, false, &file));
  KVSTRATA_RETURN_IF_ERROR(file->length(&length));
  if (length > kMaxBytes) return Status(StatusCode::kCorrupt, "too long");
  text->resize(length);
  const ReadPart part{text->data(), length};
  return file->read(std::span(&part, 1), 0);
}

Status FsSharedFiles::write(const std::string& path, std::uint64_t writer,
                            const std::string& text) {
  const std::string temp = this->path("temp", writer);
  std::unique_ptr<File> file;
  Status status = layer_.open(temp, FileMode::kCreate, false, &file);
  if (is_os_error(status, EEXIST)) {
    KVSTRATA_RETURN_IF_ERROR(layer_.unlink(temp));
    status = layer_.open(temp, FileMode::kCreate, false, &file);
  }
  KVSTRATA_RETURN_IF_ERROR(status);
  const WritePart part{text.data(), text.size()};
  KVSTRATA_RETURN_IF_ERROR(file->write(std::span(&part, 1), 0));
  return layer_.rename(temp, path);
}

Status FsSharedFiles::read_member(std::uint64_t id, FsMemberState* out) {
  std::string text;
  KVSTRATA_RETURN_IF_ERROR(read(path("member", id), &text));
  FsMemberState state;
  if (!decode(text, &state)) return Status(StatusCode::kCorrupt, "a member's file");
  *out = std::move(state);
  return Status();
}

Status FsSharedFiles::read_janitor(std::uint64_t generation, FsJanitorState* out,
                                   std::string* text) {
  text->clear();
  KVSTRATA_RETURN_IF_ERROR(read(path("janitor", generation), text));
  FsJanitorState state;
  if (!decode(*text, &state)) return Status(StatusCode::kCorrupt, "a janitor's file");
  *out = std::move(state);
  return Status();
}

Status FsSharedFiles::write_member(std::uint64_t id, const FsMemberState& state) {
  return write(path("member", id), id, encode(state));
}

Status FsSharedFiles::take_office(std::uint64_t generation) {
  std::unique_ptr<File> file;
  return layer_.open(path("janitor", generation), FileMode::kCreate, false, &file);
}

Status FsSharedFiles::write_janitor(std::uint64_t generation, std::uint64_t writer,
                                    const FsJanitorState& state) {
  return write(path("janitor", generation), writer, encode(state));
}

Status FsSharedFiles::now(std::uint64_t writer, std::int64_t* unix_ns) {
  FileStat found;
  KVSTRATA_RETURN_IF_ERROR(write(path("temp", writer) + ".now", writer, "now"));
  KVSTRATA_RETURN_IF_ERROR(layer_.stat(path("temp", writer) + ".now", &found));
  *unix_ns = found.modified_unix_ns;
  return layer_.unlink(path("temp", writer) + ".now");
}

void FsSharedFiles::forget_member(std::uint64_t id) {
  for (const char* const what : {"temp", "member", "lock"})
    (void)layer_.unlink(path(what, id));
}

void FsSharedFiles::forget_janitor(std::uint64_t generation) {
  (void)layer_.unlink(path("janitor", generation));
}

}  // namespace kvstrata
