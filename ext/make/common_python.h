// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What generated sources include: as common.h, with Python.

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include "common.h"
