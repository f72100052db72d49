// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A connector over one directory for benchmarks/lanes_hol.py: one file per record, `exists` is one
// stat per key, a put is durable. It has neither loads nor a cap, because that benchmark needs
// neither.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "kvstrata/connector.h"

namespace {

using namespace kvstrata;

class StatFiles final : public Connector {
 public:
  explicit StatFiles(std::string base) : base_(std::move(base)) {}

  ConnectorCapabilities capabilities() const noexcept override {
    return {.persistent = true, .shared = true};
  }

  std::string open(const ConnectorContext&) override {
    return ::mkdir(base_.c_str(), 0700) == 0 || errno == EEXIST
               ? ""
               : base_ + ": cannot create this directory";
  }

  void exists(std::span<ExistsItem> items) noexcept override {
    for (ExistsItem& item : items) {
      struct stat found{};
      if (::stat(path_of(item.key).c_str(), &found) == 0) {
        item.presence = Presence::kPresent;
      } else if (errno == ENOENT) {
        item.presence = Presence::kAbsent;
      } else {
        item.reason = "io";
      }
    }
  }

  void put(std::span<PutItem> piece) noexcept override {
    for (PutItem& item : piece) {
      const std::string path = path_of(item.key);
      const std::string part = path + ".part";
      const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
      const bool written =
          fd >= 0 &&
          ::pwrite(fd, item.bytes, item.length, 0) == static_cast<ssize_t>(item.length) &&
          ::fdatasync(fd) == 0 && ::rename(part.c_str(), path.c_str()) == 0;
      if (fd >= 0) ::close(fd);
      item.status = written ? PutStatus::kStored : PutStatus::kFailed;
      item.reason = written ? "" : "io";
    }
  }

  void put_end(std::span<PutItem> batch) noexcept override {
    const int fd = ::open(base_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool synced = fd >= 0 && ::fsync(fd) == 0;
    if (fd >= 0) ::close(fd);
    if (synced) return;
    for (PutItem& item : batch) {
      item.status = PutStatus::kFailed;
      item.reason = "io";
    }
  }

  void load(std::span<LoadItem> piece) noexcept override {
    for (LoadItem& item : piece)
      item.reason = "unsupported";
  }

  void remove(std::span<DeleteItem> items) noexcept override {
    for (DeleteItem& item : items)
      item.removed = ::unlink(path_of(item.key).c_str()) == 0;
  }

  ConnectorUsage usage() noexcept override { return {}; }
  void close() noexcept override {}

 private:
  std::string path_of(const Digest& key) const {
    constexpr char kHex[] = "0123456789abcdef";
    std::string path = base_ + "/";
    for (const unsigned char byte : key) {
      path += kHex[byte >> 4];
      path += kHex[byte & 15];
    }
    return path;
  }

  const std::string base_;
};

PyObject* connector(PyObject*, PyObject* arguments) {
  const char* base = nullptr;
  if (!PyArg_ParseTuple(arguments, "s", &base)) return nullptr;
  Connector* const made = new StatFiles(base);
  return PyCapsule_New(made, connector_capsule_name, nullptr);
}

PyMethodDef methods[] = {
    {"connector", connector, METH_VARARGS,
     "connector(base_path): return a capsule that holds a connector over this directory."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "stat_files", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_stat_files() {
  return PyModule_Create(&module);
}
