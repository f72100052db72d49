# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# A storage medium in C++, taken out of its capsule.

cdef extern from *:
    """
    static void exists_now(kvstrata::Connector& connector, std::vector<kvstrata::ExistsItem>& items) {
      connector.exists(items);
    }
    static void remove_now(kvstrata::Connector& connector, std::vector<kvstrata::DeleteItem>& items) {
      connector.remove(items);
    }
    """
    void exists_now(CConnector&, vector[ExistsItem]&) noexcept nogil
    void remove_now(CConnector&, vector[DeleteItem]&) noexcept nogil


cdef int set_key(Digest& key, object value) except -1:
    cdef BorrowedBuffer view
    if PyBytes_CheckExact(value) and PyBytes_GET_SIZE(value) == 32:  # the usual case
        memcpy(key.data(), PyBytes_AS_STRING(value), 32)
        return 0
    view.take(value)
    if view.bytes() != 32:
        raise ValueError(f"key: must have 32 bytes, not {view.bytes()}")
    memcpy(key.data(), view.data(), 32)
    return 0


cdef tuple presences_of(vector[ExistsItem]& items):
    """(a presence for each key, the first reason that the connector gave for not knowing one)"""
    cdef Py_ssize_t count = <Py_ssize_t>items.size()
    cdef bytes presences = PyBytes_FromStringAndSize(NULL, count)
    cdef char* out = PyBytes_AS_STRING(presences)
    cdef const char* reason = ""
    cdef Py_ssize_t i
    for i in range(count):
        out[i] = <char><int>items[i].presence
        if reason[0] == 0:
            reason = items[i].reason
    return presences, reason.decode()


cdef Py_ssize_t count_keys(const unsigned char[::1] keys) except -1:
    if keys.shape[0] % 32:
        raise ValueError(f"keys: must have 32 bytes each, not {keys.shape[0]} in all")
    return keys.shape[0] // 32


cdef object keys_of(vector[Digest]& keys):
    return [(<char*>keys[i].data())[:32] for i in range(keys.size())]


cdef class NativeConnector:
    """A storage medium in C++ (ext/core/include/kvstrata/connector.h), taken out of the capsule that its module made.

    This object and the jobs that use the medium own it together.  Raises ValueError for anything but an unused
    capsule of this version.
    """

    cdef shared_ptr[CConnector] connector
    # The fields of `kvstrata::ConnectorCapabilities` by name, without `items_per_piece`.
    cdef readonly dict capabilities  # dict[str, Any]
    cdef size_t per_piece

    def __cinit__(self, capsule: object) -> None:
        cdef ConnectorCapabilities can
        if not PyCapsule_IsValid(capsule, connector_capsule_name):
            raise ValueError(
                f"connector: must be an unused capsule named {connector_capsule_name.decode()!r}, made with the "
                f"headers of this version of kvstrata; found {capsule!r:.100}"
            )
        self.connector.reset(<CConnector*>PyCapsule_GetPointer(capsule, connector_capsule_name))
        # This object owns the connector now. The capsule's destructor is meant for a capsule whose connector was never
        # taken: now it would free the connector a second time, or fail on the new name.
        PyCapsule_SetDestructor(capsule, NULL)
        PyCapsule_SetName(capsule, "kvstrata.Connector.taken")
        can = self.connector.get().capabilities()
        if can.items_per_piece == 0 or can.max_batch == 0:
            raise ValueError("connector: capabilities: items_per_piece and max_batch must be at least 1")
        self.per_piece = can.items_per_piece
        self.capabilities = {
            "persistent": bool(can.persistent),
            "shared": bool(can.shared),
            "can_delete": bool(can.can_delete),
            "can_clear": bool(can.can_clear),
            "wants_registered_memory": bool(can.wants_registered_memory),
            "lists": bool(can.lists),
            "quiesce": "never" if can.quiesce == Quiesce.kNever else "drain",
            "exists_is_quick": bool(can.exists_is_quick),
            "max_batch": can.max_batch,
        }

    @property
    def ready(self) -> bool:
        """Whether the connector has read its medium's index, so that `exists_now` and `list_keys` answer at once."""
        return bool(self.connector.get().ready())

    def exists_now(self, keys: bytes) -> tuple[bytes, str] | None:
        """A presence for each of the 32-byte keys, and the reason why some are unknown.

        Asks in the calling thread, without the GIL; returns None if the connector would have to wait.  Raises
        ValueError if the keys do not have 32 bytes each.
        """
        cdef vector[ExistsItem] items
        if not self.connector.get().ready():
            return None
        items = self.exists_items(keys)
        with nogil:
            exists_now(self.connector.get()[0], items)
        return presences_of(items)

    # The rest is for threads of lanes, and does not keep the GIL.

    def open(self, instance_id: str, region: int, region_bytes: int) -> str:
        """Open the connector; returns an error message, or an empty string."""
        cdef ConnectorContext context
        cdef string wrong
        context.instance_id = (<str>instance_id).encode()
        context.region = <uint8_t*><size_t>region
        context.region_bytes = region_bytes
        try:
            with nogil:
                wrong = self.connector.get().open(context)
        except Exception as error:
            return str(error) or "opening failed"
        return wrong.decode(errors="replace")

    def list_keys(self, uint64_t cursor, size_t most) -> tuple[list[bytes], int]:
        """Keys, and the next cursor: 0 after the last. REQUIRES: `ready`, and `most` is at least 1."""
        cdef vector[Digest] keys
        with nogil:
            cursor = self.connector.get().list(cursor, most, &keys)
        return keys_of(keys), cursor

    def remove(self, const unsigned char[::1] keys) -> int:
        """Delete keys; returns how many records were removed."""
        cdef vector[DeleteItem] items
        cdef size_t i
        items.resize(count_keys(keys))
        for i in range(items.size()):
            memcpy(items[i].key.data(), &keys[32 * i], 32)
        with nogil:
            remove_now(self.connector.get()[0], items)
        return sum([items[i].removed for i in range(items.size())])

    def clear(self) -> int:
        """Remove all records; returns how many were removed."""
        cdef uint64_t removed
        with nogil:
            removed = self.connector.get().clear()
        return removed

    def usage(self) -> tuple[int, int, int]:
        """(used bytes, capacity in bytes, records)"""
        cdef ConnectorUsage usage
        with nogil:
            usage = self.connector.get().usage()
        return usage.used_bytes, usage.capacity_bytes, usage.records

    def close(self) -> None:
        """Close the connector. REQUIRES: no other call of it runs."""
        with nogil:
            self.connector.get().close()

    def counts(self) -> dict[str, int]:
        """The connector's counters, by name."""
        cdef vector[ConnectorCount] counts
        cdef size_t i
        self.connector.get().counts(&counts)
        return {counts[i].name.decode(): counts[i].value for i in range(counts.size())}

    def take_notes(self) -> list[tuple[bool, str]]:
        """Notes for the log since the last call: (is a warning, sentence)."""
        cdef vector[ConnectorNote] notes
        cdef size_t i
        self.connector.get().take_notes(&notes)
        return [(bool(notes[i].warning), notes[i].text.decode(errors="replace")) for i in range(notes.size())]

    cdef vector[ExistsItem] exists_items(self, const unsigned char[::1] keys) except *:
        cdef vector[ExistsItem] items
        cdef Py_ssize_t i
        items.resize(count_keys(keys))
        for i in range(<Py_ssize_t>items.size()):
            memcpy(items[i].key.data(), &keys[32 * i], 32)
        return items
