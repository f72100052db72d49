// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Lane jobs that Python submits. Each job owns a reference to its token, the Python object that
// gets its outcome. References are taken and dropped with the GIL, which ~Token takes itself; no
// other function needs the GIL unless its comment says so.
#pragma once

#include <Python.h>

#include <memory>
#include <utility>
#include <vector>

#include "lanes/connector_jobs.h"
#include "pool/pool.h"

namespace kvstrata::python {

class Token {
 public:
  // Takes over the caller's reference.
  explicit Token(PyObject* owned) noexcept : owned_(owned) {}
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  virtual ~Token() {
    if (owned_ == nullptr) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(owned_);
    PyGILState_Release(state);
  }

  PyObject* get() const noexcept { return owned_; }

 private:
  PyObject* owned_;
};

// A call of Python code: `run_call` runs the call that the token describes and stores the result in
// the token.
class CallJob final : public LaneJob, public Token {
 public:
  CallJob(PyObject* owned, void (*run_call)(PyObject*)) noexcept
      : Token(owned), run_call_(run_call) {}
  void run(std::size_t /*index*/) override { run_call_(get()); }

 private:
  void (*run_call_)(PyObject*);
};

template <typename Job>
class ConnectorJob final : public Job, public Token {
 public:
  template <typename... Arguments>
  explicit ConnectorJob(PyObject* owned, Arguments&&... arguments)
      : Job(std::forward<Arguments>(arguments)...), Token(owned) {}
};

// Makes a job that owns a new reference to `token`. REQUIRES: the GIL.
template <typename Job, typename... Arguments>
std::unique_ptr<LaneJob> make_job(PyObject* token, Arguments&&... arguments) {
  Py_INCREF(token);
  try {
    if constexpr (std::is_same_v<Job, CallJob>) {
      return std::make_unique<CallJob>(token, std::forward<Arguments>(arguments)...);
    } else {
      return std::make_unique<ConnectorJob<Job>>(token, std::forward<Arguments>(arguments)...);
    }
  } catch (...) {
    Py_DECREF(token);
    throw;
  }
}

inline std::unique_ptr<LaneJob> make_call(PyObject* token, void (*run_call)(PyObject*)) {
  return make_job<CallJob>(token, run_call);
}
inline std::unique_ptr<LaneJob> make_exists(PyObject* token, std::shared_ptr<Connector> connector,
                                            std::vector<ExistsItem>& items) {
  return make_job<ExistsJob>(token, std::move(connector), std::move(items));
}

template <typename Job>
std::unique_ptr<LaneJob> make_batch(PyObject* token, std::shared_ptr<Connector> connector,
                                    std::vector<typename Job::Item>& items, std::size_t per_piece) {
  return make_job<Job>(token, std::move(connector), std::move(items), per_piece);
}

inline PyObject* token_of(LaneJob* job) noexcept {
  return dynamic_cast<Token&>(*job).get();
}
template <typename Job>
Job* job_as(LaneJob* job) noexcept {
  return dynamic_cast<Job*>(job);
}

// A hold of bytes; dropping its last copy drops the extent's hold, without the GIL.
inline BytesHold hold_of(std::shared_ptr<Hold> hold) {
  Hold* const address = hold.get();
  return BytesHold(address, [hold = std::move(hold)](void*) { hold->drop(); });
}

// A hold of bytes; dropping its last copy calls `object.drop()` and takes the GIL for that.
// REQUIRES: the GIL.
inline BytesHold hold_of_object(PyObject* object) {
  Py_INCREF(object);
  return BytesHold(object, [](void* owned) {
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject* const hold = static_cast<PyObject*>(owned);
    PyObject* const result = PyObject_CallMethod(hold, "drop", nullptr);
    if (result == nullptr) PyErr_WriteUnraisable(hold);
    Py_XDECREF(result);
    Py_DECREF(hold);
    PyGILState_Release(state);
  });
}

}  // namespace kvstrata::python
