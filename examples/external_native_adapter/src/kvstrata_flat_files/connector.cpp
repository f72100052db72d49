// A storage connector outside kvstrata: one file per record, all in one directory.
//
//   <base>/<64 hex>         a record, complete and synced before it gets this name
//   <base>/<64 hex>.part    a record that is being written; removed at the next start
//
// A connector has to get these things right:
//   - several threads at a time: `mutex_` guards the index; records are read and written without
//   it;
//   - a key that is put twice at the same time is stored once: `claimed_`;
//   - STORED is durable: fdatasync before the rename (put), then one sync of the directory for each
//     batch (put_end);
//   - the cap: the oldest records make room before a record is written, and are reported
//     (take_evicted).
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "kvstrata/connector.h"

namespace {

using kvstrata::DeleteItem;
using kvstrata::Digest;
using kvstrata::ExistsItem;
using kvstrata::LoadItem;
using kvstrata::LoadStatus;
using kvstrata::PutItem;
using kvstrata::PutStatus;

constexpr const char kHex[] = "0123456789abcdef";

std::string name_of(const Digest& key) {
  std::string name;
  for (const unsigned char byte : key) {
    name += kHex[byte >> 4];
    name += kHex[byte & 15];
  }
  return name;
}

bool key_of(const std::string& name, Digest* key) {
  if (name.size() != 2 * key->size()) return false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const char* digit = std::strchr(kHex, name[i]);
    if (digit == nullptr || *digit == '\0') return false;
    unsigned char& byte = (*key)[i / 2];
    byte = static_cast<unsigned char>((i % 2 == 0 ? 0 : byte << 4) | (digit - kHex));
  }
  return true;
}

class File {
 public:
  File(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  explicit operator bool() const { return fd_ >= 0; }
  int fd() const { return fd_; }

 private:
  int fd_;
};

class FlatFiles final : public kvstrata::Connector {
 public:
  FlatFiles(std::string base, std::uint64_t capacity_bytes)
      : base_(std::move(base)), capacity_bytes_(capacity_bytes) {}

  kvstrata::ConnectorCapabilities capabilities() const noexcept override {
    // `exists` may block, because it takes a lock that is held while files are removed.
    return {.persistent = true, .can_clear = true};
  }

  std::string open(const kvstrata::ConnectorContext&) override {
    namespace fs = std::filesystem;
    std::error_code error;
    fs::create_directories(base_, error);
    if (error || ::access(base_.c_str(), R_OK | W_OK | X_OK) != 0) {
      return "base_path: '" + base_ +
             "' cannot be used: " + (error ? error.message() : std::strerror(errno)) +
             "; give a directory that may be written";
    }
    std::multimap<fs::file_time_type, std::pair<Digest, std::uint64_t>> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(base_, error)) {
      const std::string name = entry.path().filename().string();
      Digest key{};
      if (name.ends_with(".part") && key_of(name.substr(0, name.size() - 5), &key))
        fs::remove(entry.path(), error);
      else if (key_of(name, &key) && entry.is_regular_file(error))
        found.emplace(entry.last_write_time(error), std::pair(key, entry.file_size(error)));
    }
    if (error) return "base_path: '" + base_ + "' cannot be read: " + error.message();
    for (const auto& [time, record] : found)
      add(record.first, record.second);
    make_room(0);
    return "";
  }

  void exists(std::span<ExistsItem> items) noexcept override {
    const std::lock_guard lock(mutex_);
    for (ExistsItem& item : items) {
      const bool present = index_.contains(item.key);
      item.presence = present ? kvstrata::Presence::kPresent : kvstrata::Presence::kAbsent;
    }
  }

  void put(std::span<PutItem> piece) noexcept override {
    for (PutItem& item : piece) {
      std::tie(item.status, item.reason) = put_one(item);
      item.hold.reset();  // the bytes are written
    }
  }

  void put_end(std::span<PutItem> batch) noexcept override {
    const File folder(base_, O_RDONLY | O_DIRECTORY);
    if (folder && ::fsync(folder.fd()) == 0) return;
    for (PutItem& item : batch) {
      if (item.status != PutStatus::kStored) continue;
      forget(item.key);
      item.status = PutStatus::kFailed;
      item.reason = "io";
    }
  }

  void load(std::span<LoadItem> piece) noexcept override {
    for (LoadItem& item : piece) {
      std::tie(item.status, item.reason) = load_one(item);
      item.hold.reset();
    }
  }

  void remove(std::span<DeleteItem> items) noexcept override {
    for (DeleteItem& item : items)
      item.removed = forget(item.key);
  }

  std::uint64_t clear() noexcept override {
    std::uint64_t removed = 0;
    std::unique_lock lock(mutex_);
    while (!index_.empty()) {
      const Digest key = index_.begin()->first;
      lock.unlock();
      removed += forget(key);
      lock.lock();
    }
    return removed;
  }

  kvstrata::ConnectorUsage usage() noexcept override {
    const std::lock_guard lock(mutex_);
    return {used_bytes_, capacity_bytes_, index_.size()};
  }

  void take_evicted(std::vector<Digest>* keys) noexcept override {
    const std::lock_guard lock(mutex_);
    keys->swap(evicted_);
    evicted_.clear();
  }

  void close() noexcept override {}

 private:
  struct Record {
    std::uint64_t bytes;
    std::list<Digest>::iterator age;
  };

  std::string path_of(const Digest& key) const { return base_ + "/" + name_of(key); }

  // The next three functions REQUIRE that their caller holds mutex_, or is open().
  void add(const Digest& key, std::uint64_t bytes) {
    index_[key] = Record{bytes, ages_.insert(ages_.end(), key)};
    used_bytes_ += bytes;
  }
  void drop(std::map<Digest, Record>::iterator record) {
    used_bytes_ -= record->second.bytes;
    ages_.erase(record->second.age);
    index_.erase(record);
  }
  void make_room(std::uint64_t more) {
    while (capacity_bytes_ != 0 && used_bytes_ + writing_bytes_ + more > capacity_bytes_ &&
           !ages_.empty()) {
      const Digest oldest = ages_.front();
      ::unlink(path_of(oldest).c_str());
      drop(index_.find(oldest));
      evicted_.push_back(oldest);
    }
  }

  bool forget(const Digest& key) {
    const std::lock_guard lock(mutex_);
    const auto record = index_.find(key);
    if (record == index_.end()) return false;
    ::unlink(path_of(key).c_str());
    drop(record);
    return true;
  }

  std::pair<PutStatus, const char*> put_one(const PutItem& item) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !claimed_.contains(item.key); });
      if (index_.contains(item.key)) return {PutStatus::kExists, ""};
      if (capacity_bytes_ != 0 && item.length > capacity_bytes_)
        return {PutStatus::kFailed, "larger_than_cap"};
      changed_.wait(lock, [&] {
        return capacity_bytes_ == 0 || writing_bytes_ + item.length <= capacity_bytes_;
      });
      make_room(item.length);
      claimed_.insert(item.key);
      writing_bytes_ += item.length;
    }
    const int error = write(item);
    const std::lock_guard lock(mutex_);
    claimed_.erase(item.key);
    writing_bytes_ -= item.length;
    if (error == 0) add(item.key, item.length);
    changed_.notify_all();
    if (error == 0) return {PutStatus::kStored, ""};
    if (error == ENOSPC || error == EDQUOT) return {PutStatus::kThrottled, "disk_full"};
    return {PutStatus::kFailed, "io"};
  }

  // Writes the record to its file and syncs the file. Returns 0 or errno.
  int write(const PutItem& item) const {
    const std::string path = path_of(item.key);
    const std::string part = path + ".part";
    {
      const File file(part, O_WRONLY | O_CREAT | O_TRUNC);
      if (!file) return errno;
      for (std::uint32_t done = 0; done < item.length;) {
        const ssize_t count = ::pwrite(file.fd(), item.bytes + done, item.length - done, done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return fail(part, count < 0 ? errno : EIO);
        done += static_cast<std::uint32_t>(count);
      }
      if (::fdatasync(file.fd()) != 0) return fail(part, errno);
    }
    return ::rename(part.c_str(), path.c_str()) == 0 ? 0 : fail(part, errno);
  }

  static int fail(const std::string& part, int error) {
    ::unlink(part.c_str());
    return error;
  }

  std::pair<LoadStatus, const char*> load_one(LoadItem& item) {
    {
      const std::lock_guard lock(mutex_);
      const auto record = index_.find(item.key);
      if (record == index_.end()) return {LoadStatus::kAbsent, ""};
      ages_.splice(ages_.end(), ages_, record->second.age);  // just used, so evicted last
    }
    const File file(path_of(item.key), O_RDONLY);
    if (!file) {
      if (errno != ENOENT) return {LoadStatus::kFailed, "io"};
      forget(item.key);  // removed by another program
      return {LoadStatus::kAbsent, ""};
    }
    struct stat status{};
    if (::fstat(file.fd(), &status) != 0) return {LoadStatus::kFailed, "io"};
    if (status.st_size > static_cast<off_t>(item.length)) return {LoadStatus::kCorrupt, "length"};
    item.length = static_cast<std::uint32_t>(status.st_size);
    for (std::uint32_t done = 0; done < item.length;) {
      const ssize_t count = ::pread(file.fd(), item.bytes + done, item.length - done, done);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return {LoadStatus::kFailed, "io"};
      if (count == 0) return {LoadStatus::kCorrupt, "length"};
      done += static_cast<std::uint32_t>(count);
    }
    return {LoadStatus::kLoaded, ""};
  }

  const std::string base_;
  const std::uint64_t capacity_bytes_;  // 0: no cap
  std::mutex mutex_;
  std::condition_variable changed_;  // notified when a put has ended
  std::map<Digest, Record> index_;
  std::list<Digest> ages_;    // oldest first
  std::set<Digest> claimed_;  // being written
  std::vector<Digest> evicted_;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t writing_bytes_ = 0;
};

PyObject* connector(PyObject*, PyObject* arguments) {
  const char* base = nullptr;
  unsigned long long capacity_bytes = 0;
  if (!PyArg_ParseTuple(arguments, "sK", &base, &capacity_bytes)) return nullptr;
  kvstrata::Connector* made = nullptr;
  try {
    made = new FlatFiles(base, capacity_bytes);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  PyObject* capsule = PyCapsule_New(made, kvstrata::connector_capsule_name, nullptr);
  if (capsule == nullptr) delete made;
  return capsule;
}

PyMethodDef methods[] = {
    {"connector", connector, METH_VARARGS, "connector(base_path, capacity_bytes): the capsule."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_connector", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__connector() {
  return PyModule_Create(&module);
}
