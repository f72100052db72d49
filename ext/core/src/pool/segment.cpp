// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/segment.h"

namespace kvstrata {

Status PoolSegment::back_index(int index_fd, std::uint64_t file_bytes, std::uint64_t head_bytes,
                               std::uint64_t cold_offset, std::uint64_t cold_bytes) {
  if (index_backing.bytes() == 0)
    KVSTRATA_RETURN_IF_ERROR(index_backing.attach(index_fd, file_bytes));
  if (index_backing.ensure(0, head_bytes) && index_backing.ensure(cold_offset, cold_bytes))
    return Status();
  return Status(StatusCode::kOsError, "the file system has no memory for the index",
                index_backing.error());
}

Status PoolSegment::map_index(int index_fd, std::uint64_t file_bytes) {
  return Mapping::map(index_fd, file_bytes, true, true, &index_mapping);
}

Status PoolSegment::open_extents(int extents_fd) {
  const std::uint64_t extents_bytes = index.header().extents_bytes;
  KVSTRATA_RETURN_IF_ERROR(Mapping::map(extents_fd, extents_bytes, true, true, &extents_mapping));
  KVSTRATA_RETURN_IF_ERROR(extents_backing.attach(extents_fd, extents_bytes));
  return Mapping::anonymous(index.capacity() * sizeof(EntryLocal), &local_mapping);
}

}  // namespace kvstrata
