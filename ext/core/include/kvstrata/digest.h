// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// 32 bytes of SHA-256, as they stand in files and messages: keys, identities, slices.
#pragma once

#include <array>

namespace kvstrata {

using Digest = std::array<unsigned char, 32>;

}  // namespace kvstrata
