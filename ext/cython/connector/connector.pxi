# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# A storage medium in C++, taken out of its capsule.

cdef extern from *:
    """
    static void exists_now(kvstrata::Connector& connector, std::vector<kvstrata::ExistsItem>& items) {
      connector.exists(items);
    }
    """
    void exists_now(CConnector&, vector[ExistsItem]&) noexcept nogil


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


cdef list found_of(vector[ExistsItem]& items, object found):
    """Calls `found(presence, record_bytes, reason)` and returns the result for each item. Items with equal answers may
    share one call and its result.
    """
    cdef Py_ssize_t count = <Py_ssize_t>items.size()
    cdef list made = [None] * count
    # The last result for each presence: most records of a medium have the same length.
    cdef list last = [None, None, None]
    cdef Py_ssize_t[3] at = [-1, -1, -1]
    cdef Py_ssize_t i
    cdef int presence
    for i in range(count):
        presence = <int>items[i].presence
        if (
            at[presence] < 0
            or items[i].record_bytes != items[at[presence]].record_bytes
            or items[i].reason != items[at[presence]].reason
        ):
            at[presence] = i
            last[presence] = found(presence, items[i].record_bytes, items[i].reason.decode())
        made[i] = last[presence]
    return made


cdef class NativeConnector:
    cdef shared_ptr[CConnector] connector
    cdef readonly dict capabilities
    cdef size_t per_piece

    def __cinit__(self, capsule):
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
            "has_heads": bool(can.has_heads),
            "lists": bool(can.lists),
            "quiesce": "never" if can.quiesce == Quiesce.kNever else "drain",
            "exists_is_quick": bool(can.exists_is_quick),
            "max_batch": can.max_batch,
        }

    @property
    def ready(self):
        return bool(self.connector.get().ready())

    def exists_now(self, keys, found):
        cdef vector[ExistsItem] items
        if not self.connector.get().ready():
            return None
        items = self.exists_items(keys)
        with nogil:
            exists_now(self.connector.get()[0], items)
        return found_of(items, found)

    def counts(self):
        cdef vector[ConnectorCount] counts
        cdef size_t i
        self.connector.get().counts(&counts)
        return {counts[i].name.decode(): counts[i].value for i in range(counts.size())}

    def take_notes(self):
        cdef vector[ConnectorNote] notes
        cdef size_t i
        self.connector.get().take_notes(&notes)
        return [(bool(notes[i].warning), notes[i].text.decode(errors="replace")) for i in range(notes.size())]

    cdef vector[ExistsItem] exists_items(self, object keys) except *:
        cdef vector[ExistsItem] items
        cdef Py_ssize_t i = 0
        items.resize(len(keys))
        for key in keys:
            set_key(items[i].key, key)
            i += 1
        return items
