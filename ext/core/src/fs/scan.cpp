// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/scan.h"

#include <algorithm>
#include <tuple>

namespace kvstrata {

namespace {

class Walk {
 public:
  Walk(FileLayer& layer, const FsPaths& paths, const std::function<bool()>& go_on, FsScan* out)
      : layer_(layer), paths_(paths), go_on_(go_on), out_(out) {}

  Status tmp() {
    std::vector<FolderEntry> entries;
    KVSTRATA_RETURN_IF_ERROR(list(paths_.tmp(), &entries));
    for (const FolderEntry& entry : entries) {
      if (entry.is_file && is_fs_part(entry.name))
        KVSTRATA_RETURN_IF_ERROR(remove(paths_.tmp() + "/" + entry.name));
      else
        out_->foreign += 1;
    }
    return Status();
  }

  Status base() {
    std::vector<FolderEntry> entries;
    KVSTRATA_RETURN_IF_ERROR(list(paths_.base(), &entries));
    out_->folders.push_back(paths_.base());
    for (const FolderEntry& entry : entries) {
      if (entry.is_folder && is_fs_shard(entry.name))
        KVSTRATA_RETURN_IF_ERROR(outer(entry.name));
      else
        out_->foreign += paths_.is_own(entry.name) ? 0 : 1;
    }
    std::ranges::sort(out_->records, {}, [](const FsScan::Record& record) {
      return std::tie(record.recency_unix_ns, record.key);
    });
    return Status();
  }

 private:
  Status outer(const std::string& shard) {
    std::vector<FolderEntry> entries;
    KVSTRATA_RETURN_IF_ERROR(list(paths_.base() + "/" + shard, &entries));
    out_->folders.push_back(paths_.base() + "/" + shard);
    for (const FolderEntry& entry : entries) {
      if (entry.is_folder && is_fs_shard(entry.name))
        KVSTRATA_RETURN_IF_ERROR(inner(shard, entry.name));
      else
        out_->foreign += 1;
    }
    return Status();
  }

  Status inner(const std::string& first, const std::string& second) {
    if (!go_on_()) return Status(StatusCode::kCancelled, "closing");
    const std::string folder = paths_.base() + "/" + first + "/" + second;
    std::vector<FolderEntry> entries;
    KVSTRATA_RETURN_IF_ERROR(list(folder, &entries));
    out_->folders.push_back(folder);
    for (const FolderEntry& entry : entries) {
      FsScan::Record record;
      if (!entry.is_file || !read_fs_record_name(entry.name, &record.key) ||
          !entry.name.starts_with(first + second)) {
        out_->foreign += 1;
        continue;
      }
      const std::string path = folder + "/" + entry.name;
      FileStat stat;
      const Status status = layer_.stat(path, &stat);
      if (is_not_there(status)) continue;
      if (!status.ok()) return failed(path, status);
      if (!stat.is_file || stat.length < kMinRecordBytes || stat.length > UINT32_MAX) {
        KVSTRATA_RETURN_IF_ERROR(remove(path));
        continue;
      }
      record.length = static_cast<std::uint32_t>(stat.length);
      record.recency_unix_ns = std::max(stat.accessed_unix_ns, stat.modified_unix_ns);
      out_->records.push_back(record);
      out_->charge += fs_charge(stat.length);
    }
    return Status();
  }

  Status list(const std::string& path, std::vector<FolderEntry>* entries) {
    const Status status = layer_.list(path, entries);
    return status.ok() || is_not_there(status) ? Status() : failed(path, status);
  }

  Status remove(const std::string& path) {
    const Status status = layer_.unlink(path);
    if (!status.ok() && !is_not_there(status)) return failed(path, status);
    out_->removed += 1;
    return Status();
  }

  Status failed(const std::string& path, const Status& status) {
    out_->failed = describe_file_error(path, status);
    return status;
  }

  FileLayer& layer_;
  const FsPaths& paths_;
  const std::function<bool()>& go_on_;
  FsScan* out_;
};

}  // namespace

Status scan_fs_directory(FileLayer& layer, const FsPaths& paths, const std::function<bool()>& go_on,
                         FsScan* out) {
  Walk walk(layer, paths, go_on, out);
  KVSTRATA_RETURN_IF_ERROR(walk.tmp());
  return walk.base();
}

}  // namespace kvstrata
