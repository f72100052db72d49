// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/shared/folder.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

namespace kvstrata {

namespace {

constexpr std::uint64_t kMaxBytes = 1 << 20;
// Files with longer numbers are foreign, so that the number after the highest one fits too.
constexpr std::size_t kMaxDigits = 15;

}  // namespace

std::string FsSharedFolder::path(const char* what, std::uint64_t number) const {
  return folder_ + "/" + what + "." + std::to_string(number);
}

Status FsSharedFolder::make_folder() {
  const Status status = layer_.make_folder(folder_);
  return is_os_error(status, EEXIST) ? Status() : status;
}

Status FsSharedFolder::list(Listing* out) {
  *out = {};
  std::vector<FolderEntry> entries;
  KVSTRATA_RETURN_IF_ERROR(layer_.list(folder_, &entries));
  for (const FolderEntry& entry : entries) {
    const std::string_view name = entry.name;
    const std::size_t dot = name.find('.');
    const std::string_view what = name.substr(0, dot);
    std::uint64_t number = 0;
    std::vector<std::uint64_t>* const group = what == "lock"      ? &out->locks
                                              : what == "member"  ? &out->sharers
                                              : what == "janitor" ? &out->janitors
                                                                  : nullptr;
    if (what == "temp") continue;
    if (group != nullptr && dot != std::string_view::npos && name.size() - dot - 1 <= kMaxDigits &&
        entry.is_file && read_fs_number(name.substr(dot + 1), &number) && number > 0)
      group->push_back(number);
    else
      out->foreign += 1;
  }
  for (auto* const group : {&out->locks, &out->sharers, &out->janitors})
    std::ranges::sort(*group);
  return Status();
}

Status FsSharedFolder::lock(std::uint64_t id, std::unique_ptr<FileLock>* out, std::string* holder) {
  return layer_.lock(path("lock", id), out, holder);
}

Status FsSharedFolder::read(const std::string& path, std::string* text) {
  std::unique_ptr<File> file;
  std::uint64_t length = 0;
  KVSTRATA_RETURN_IF_ERROR(layer_.open(path, FileMode::kRead, false, &file));
  KVSTRATA_RETURN_IF_ERROR(file->length(&length));
  if (length > kMaxBytes) return Status(StatusCode::kCorrupt, "too long");
  text->resize(length);
  const ReadPart part{text->data(), length};
  return file->read(std::span(&part, 1), 0);
}

Status FsSharedFolder::write(const std::string& path, std::uint64_t writer,
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

Status FsSharedFolder::read_sharer(std::uint64_t id, FsSharerState* out) {
  std::string text;
  KVSTRATA_RETURN_IF_ERROR(read(path("member", id), &text));
  FsSharerState state;
  if (!decode(text, &state)) return Status(StatusCode::kCorrupt, "a server's file is damaged");
  *out = std::move(state);
  return Status();
}

Status FsSharedFolder::read_janitor(std::uint64_t generation, FsJanitorState* out,
                                    std::string* text) {
  text->clear();
  KVSTRATA_RETURN_IF_ERROR(read(path("janitor", generation), text));
  FsJanitorState state;
  if (!decode(*text, &state)) return Status(StatusCode::kCorrupt, "a janitor's file is damaged");
  *out = std::move(state);
  return Status();
}

Status FsSharedFolder::write_sharer(std::uint64_t id, const FsSharerState& state) {
  return write(path("member", id), id, encode(state));
}

Status FsSharedFolder::take_office(std::uint64_t generation) {
  std::unique_ptr<File> file;
  return layer_.open(path("janitor", generation), FileMode::kCreate, false, &file);
}

Status FsSharedFolder::write_janitor(std::uint64_t generation, std::uint64_t writer,
                                     const FsJanitorState& state) {
  return write(path("janitor", generation), writer, encode(state));
}

Status FsSharedFolder::now(std::uint64_t writer, std::int64_t* unix_ns) {
  FileStat found;
  KVSTRATA_RETURN_IF_ERROR(write(path("temp", writer) + ".now", writer, "now"));
  KVSTRATA_RETURN_IF_ERROR(layer_.stat(path("temp", writer) + ".now", &found));
  *unix_ns = found.modified_unix_ns;
  return layer_.unlink(path("temp", writer) + ".now");
}

void FsSharedFolder::forget_sharer(std::uint64_t id) {
  for (const char* const what : {"temp", "member", "lock"})
    (void)layer_.unlink(path(what, id));
}

void FsSharedFolder::forget_janitor(std::uint64_t generation) {
  (void)layer_.unlink(path("janitor", generation));
}

}  // namespace kvstrata
