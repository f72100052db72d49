// A connector for tests: keeps records in memory, checks that what it is given lies in the region
// that it was told of.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "kvstrata/connector.h"

namespace {

class Probe final : public kvstrata::Connector {
 public:
  explicit Probe(bool drains) : drains_(drains) {}

  kvstrata::ConnectorCapabilities capabilities() const noexcept override {
    return {.wants_registered_memory = true,
            .quiesce = drains_ ? kvstrata::Quiesce::kDrain : kvstrata::Quiesce::kNever};
  }

  std::string open(const kvstrata::ConnectorContext& context) override {
    region_ = context.region;
    region_bytes_ = context.region_bytes;
    ends_ = region_[0] + region_[region_bytes_ - 1];  // both are mapped
    return "";
  }

  void exists(std::span<kvstrata::ExistsItem> items) noexcept override {
    const std::lock_guard lock(mutex_);
    for (auto& item : items) {
      const bool present = records_.contains(item.key);
      item.presence = present ? kvstrata::Presence::kPresent : kvstrata::Presence::kAbsent;
    }
  }

  void put(std::span<kvstrata::PutItem> piece) noexcept override {
    for (auto& item : piece) {
      look_at(item.bytes, item.length);
      const std::lock_guard lock(mutex_);
      records_[item.key].assign(reinterpret_cast<const char*>(item.bytes), item.length);
      item.hold.reset();
      item.status = kvstrata::PutStatus::kStored;
      item.reason = "";
    }
  }

  void load(std::span<kvstrata::LoadItem> piece) noexcept override {
    for (auto& item : piece) {
      look_at(item.bytes, item.length);
      const std::lock_guard lock(mutex_);
      const auto found = records_.find(item.key);
      const bool fits = found != records_.end() && found->second.size() <= item.length;
      if (fits) item.length = static_cast<std::uint32_t>(found->second.size());
      if (fits) std::memcpy(item.bytes, found->second.data(), item.length);
      item.hold.reset();
      item.status = fits ? kvstrata::LoadStatus::kLoaded : kvstrata::LoadStatus::kAbsent;
      item.reason = "";
    }
  }

  void remove(std::span<kvstrata::DeleteItem> items) noexcept override {
    const std::lock_guard lock(mutex_);
    for (auto& item : items)
      item.removed = records_.erase(item.key) > 0;
  }

  kvstrata::ConnectorUsage usage() noexcept override { return {}; }

  void counts(std::vector<kvstrata::ConnectorCount>* out) noexcept override {
    out->push_back({"region_bytes", region_bytes_});
    out->push_back({"inside", inside_});
    out->push_back({"outside", outside_});
  }

  void close() noexcept override {}

 private:
  void look_at(const std::uint8_t* bytes, std::uint64_t length) {
    const bool is_inside = bytes >= region_ && length <= region_bytes_ &&
                           bytes - region_ <= static_cast<std::ptrdiff_t>(region_bytes_ - length);
    ++(is_inside ? inside_ : outside_);
  }

  const bool drains_;
  const std::uint8_t* region_ = nullptr;
  std::uint64_t region_bytes_ = 0;
  volatile unsigned ends_ = 0;
  std::atomic<std::uint64_t> inside_{0}, outside_{0};
  std::mutex mutex_;
  std::map<kvstrata::Digest, std::string> records_;
};

PyObject* connector(PyObject*, PyObject* arguments) {
  int drains = 0;
  if (!PyArg_ParseTuple(arguments, "p", &drains)) return nullptr;
  return PyCapsule_New(new Probe(drains != 0), kvstrata::connector_capsule_name, nullptr);
}

PyMethodDef methods[] = {
    {"connector", connector, METH_VARARGS, "connector(drains): the capsule."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "probe", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_probe() {
  return PyModule_Create(&module);
}
