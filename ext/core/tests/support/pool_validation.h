// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Recomputes all state that a pool keeps from its entries, and compares.
#pragma once

#include <cstdint>

#include "pool/pool.h"

namespace kvstrata {

// OK, or kInternal naming the broken invariant.
Status validate(Pool& pool);
Status validate(const SlabMap& map);
// Entries of a size class that the policy has, -1 when one of its lists is broken.
std::int64_t listed(const Value& policy, std::uint32_t cls);

}  // namespace kvstrata
