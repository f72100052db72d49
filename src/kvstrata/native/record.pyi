"""Records: their headers, checksums and verification (`docs/formats.md`).

Addresses are ints: memory is never touched through Python objects.  The caller keeps an address mapped until the
call has returned.  Calls that touch payloads drop the GIL.  Every ValueError names the argument.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, final

from typing_extensions import Buffer

from kvstrata.errors import MediumError

class CopyOutcome(enum.IntEnum):
    """What became of one record.  Functions return these as plain ints."""

    OK = 0
    STALE = 1
    """Sound headers, but another chunk's key; no block was touched."""
    CORRUPT = 2
    """Headers or a section do not match their CRC; blocks already written must not be used."""
    MISMATCH = 3
    """A sound record that this call cannot use: it has another shape than the plan or another format version, or is
    encoded."""
    UNVERIFIED = 4
    """Its CRCs are pending, so it cannot be checked."""
    CANCELLED = 5
    """The copy never began."""
    FAILED = 6
    """Out of memory; for a copy by a GPU also the failures that `cuda.CudaCopyEngine` lists."""

class RecordError(MediumError):
    """The headers of a record are unsound; `field` names what is wrong."""

    code: str

class RecordHeader(NamedTuple):
    """The checked headers of a record. `sections` are (offset from the payload's start, length, crc)."""

    key: bytes
    identity: bytes
    slice_digest: bytes
    parent_key: bytes
    chunk_tokens: int
    created_unix_ms: int
    header_bytes: int
    payload_bytes: int
    stored_bytes: int
    stored_crc: int
    codecs: bytes
    """Numbers of the codecs in the order of encoding; empty: the payload is stored as it is."""
    sections: tuple[tuple[int, int, int], ...]

@final
class RecordSpec:
    """The facts that a record's writer states about its chunk. Keys and digests are 32 bytes."""

    def __new__(
        cls,
        key: bytes,
        identity: bytes,
        slice_digest: bytes,
        parent_key: bytes,
        chunk_tokens: int,
        created_unix_ms: int = 0,
    ) -> RecordSpec:
        """`parent_key` b"" means none; `created_unix_ms` 0 means the time of writing."""

    @property
    def key(self) -> bytes: ...

def record_bytes(section_count: int, payload_bytes: int) -> int:
    """Length of a record: header, section table and payload."""

def verify_record(address: int, length: int, expected_key: bytes | None) -> int:
    """Checks headers, key (unless None) and every section; returns a `CopyOutcome`.

    Never reads outside the `length` bytes, whatever they contain.
    """

def verify_stored_record(address: int, length: int, expected_key: bytes | None) -> int:
    """As `verify_record`, for a record as a medium stores it: of an encoded record, the stored bytes are checked."""

class Verifier:
    """Threads that help to verify many records at once: one core checks bytes slower than memory delivers them."""

    def __init__(self, helpers: int) -> None:
        """At most `helpers` threads besides the caller's. They start with the first work and end with the object."""

    def verify_stored(self, records: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """`verify_stored_record` of each (address, length, expected key), without the GIL; thread-safe."""

def explain_record(address: int, length: int, expected_key: bytes | None) -> str | None:
    """Why `verify_stored_record` does not answer OK, naming field or section, for a log; None if it does answer OK."""

def write_encoded_header(
    address: int,
    length: int,
    source_address: int,
    source_length: int,
    codecs: Buffer,
    stored_bytes: int,
    stored_crc: int = 0,
) -> int:
    """Writes the header of a record whose payload is stored encoded, and returns its length.

    All other fields are as in the header of `source`.  Raises RecordError for an unsound source, ValueError for bad
    arguments.
    """

def write_decoded_header(address: int, length: int, source_address: int, source_length: int) -> None:
    """Writes the header of the record that the encoded record at `source` decodes to.

    Raises as `write_encoded_header`.
    """

def record_header(address: int, length: int) -> RecordHeader:
    """The headers of a record, checked except for the payload. Raises RecordError."""

def seal_record(address: int, length: int, spec: RecordSpec, section_lengths: Sequence[int]) -> None:
    """Computes the CRCs of a payload, and writes the header into the room that was left before the payload.

    For writers that did not gather with a plan.  Raises ValueError, before anything is written.
    """
