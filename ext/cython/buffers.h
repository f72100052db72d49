// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The buffer of a Python object, borrowed until the BorrowedBuffer is destroyed. REQUIRES, for all
// functions and the destructor: the GIL; only data(), writable() and bytes() need none.
#pragma once

#include <Python.h>

namespace kvstrata::python {

class BorrowedBuffer {
 public:
  BorrowedBuffer() = default;
  BorrowedBuffer(const BorrowedBuffer&) = delete;
  BorrowedBuffer& operator=(const BorrowedBuffer&) = delete;
  ~BorrowedBuffer() {
    if (held_) PyBuffer_Release(&buffer_);
  }

  // One of the two is called, at most once. Returns -1 with a Python exception if the object has no
  // contiguous buffer, or no writable one.
  int borrow(PyObject* object) { return borrow(object, PyBUF_SIMPLE); }
  int borrow_writable(PyObject* object) { return borrow(object, PyBUF_WRITABLE); }
  const unsigned char* data() const { return static_cast<const unsigned char*>(buffer_.buf); }
  unsigned char* writable() const { return static_cast<unsigned char*>(buffer_.buf); }
  Py_ssize_t bytes() const { return buffer_.len; }

 private:
  int borrow(PyObject* object, int flags) {
    if (PyObject_GetBuffer(object, &buffer_, flags) != 0) return -1;
    held_ = true;
    return 0;
  }

  Py_buffer buffer_{};
  bool held_ = false;
};

}  // namespace kvstrata::python
