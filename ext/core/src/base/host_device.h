// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// KVSTRATA_HOST_DEVICE marks functions that nvcc compiles for the device as well.
#pragma once

#ifdef __CUDACC__
#define KVSTRATA_HOST_DEVICE __host__ __device__
#else
#define KVSTRATA_HOST_DEVICE
#endif
