"""Codecs: records are encoded on their way to a medium and decoded on their way back, where a tier has a `codec`.

    put    extent ─(lane)─▶ staging ─▶ medium        the extent's hold ends with the encoding
    load   medium ─▶ staging ─(lane)─▶ extent        verified there, section by section

A record names its codecs, which decide how it is decoded (docs/internals/formats.md):

    planes2 (2)   sorts the bytes of 16-bit numbers into planes; only before zstd
    zstd (3)      in slabs of 1 MiB
    aes-gcm (5)   key id ‖ nonce ‖ ciphertext ‖ tag
    mac (6)       key id ‖ nonce ‖ payload ‖ tag; the tag is AES-GCM's, with the payload as associated data too (GMAC)

Each identity, and so each tenant, has keys of its own, derived from the text of a key file.  The headers are associated
data, so a record under another key, identity or chain of codecs does not authenticate.  GMAC was chosen because it is
faster than the alternatives: 26 GB/s a core where keyed BLAKE3 makes 7 and HMAC-SHA-256 makes 2.

Invariants
1. Bytes between the codecs and the medium lie in staging of fixed size outside L1 (staging.py).  Whatever uses a block
   of it keeps a reference to the block.
2. A record to load gets as much staging as the longest encoding of a record that fits into its extent.
3. A record that cannot be decoded (unknown codec, another key, missing library) is a miss, is counted and stays stored.
   A record that does not authenticate, or decodes to other bytes than the original, is removed, so that a put replaces
   it.
4. A batch that was accepted runs to its end, even if its caller no longer waits.
5. Codecs are applied in the order of their numbers, each at most once; a record names those that were applied to it.
6. When `Chain.decode` returns, its target has passed the checksum of every section of the original record.  Whatever a
   record claims, `decode` allocates and writes no more than its target and one slab.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import importlib.util
import logging
import os
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import Meta

from kvstrata.config.demands import nearest
from kvstrata.config.private_file import read_token_file
from kvstrata.errors import AllWrong, ConfigError, install
from kvstrata.native import core
from kvstrata.native.core import CopyOutcome, RecordError, buffer_address, join_planes, split_planes
from kvstrata.observability.logging import Thinning
from kvstrata.tiers import structs
from kvstrata.tiers.base import (
    Ask,
    Item,
    Outcome,
    Presence,
    StorageAdapter,
    log_broken_contract,
    two_bytes,
)
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.reasons import (
    CODEC,
    LENGTH,
    QUEUE_FULL,
    STAGING_TOO_SMALL,
    THROTTLED,
    UNAUTHENTICATED,
)
from kvstrata.tiers.staging import Block, Staging, StagingHold
from kvstrata.tiers.structs import Place

if TYPE_CHECKING:
    from kvstrata.native.core import Hold

log = logging.getLogger(__name__)
_thinning = Thinning()

# -- the field `codec` of an entry ---------------------------------------------------------------------------

MIN_KEY_CHARS = 32
NAMES = ("zstd", "aes-gcm", "mac")
MOST_KEYS = 8


class ZstdOptions(NamedTuple):
    level: int = 1
    planes: int | None = None
    """Element size in bytes (1 or 2); None: that of the identity's dtype, or 2 if unknown."""


class ChainSettings(NamedTuple):
    """A checked `codec` field. The empty one stores records as they are."""

    zstd: ZstdOptions | None = None
    master_key: bytes = b""
    """For aes-gcm; empty: not encrypted."""
    mac_key: bytes = b""
    """For mac; empty: no mac. Never together with `master_key`, since aes-gcm authenticates as well."""
    old_keys: tuple[bytes, ...] = ()
    """Old keys, for reading only."""

    @property
    def encodes(self) -> bool:
        """Whether any codec is configured."""
        return self.zstd is not None or bool(self.keys)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All keys; the first one is for writing."""
        first = self.master_key or self.mac_key
        return (first, *self.old_keys) if first else ()


class _Zstd(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    level: Annotated[int, Meta(ge=-50, le=19)] = 1
    planes: Annotated[int, Meta(ge=1, le=2)] | None = None


class _Keyed(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    key_file: str | None = None
    key_files: list[str] | None = None


def read_chain(value: object, path: str) -> ChainSettings:
    """The chain in the field `path`. Raises ConfigError naming the wrong parts."""
    if value is None:
        return ChainSettings()
    entries = value if isinstance(value, list) else [value]
    settings, wrong = ChainSettings(), AllWrong()
    names: list[str] = []
    for i, entry in enumerate(entries):
        place = Place(f"{path}[{i}]" if isinstance(value, list) else path)
        with wrong:
            options = {"name": entry} if isinstance(entry, str) else entry
            names.append(_name(options, place, names))
            settings = _with(settings, options, place)
    wrong.tell()
    return settings


def _name(options: Any, place: Place, before: list[str]) -> str:
    """The name of the next codec of a chain. Raises ConfigError."""
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
        must = 'must be the name of a codec or an object with a "name"'
        raise ConfigError(f"{place.path}: {must}, found {options!r:.80}", field=place.path)
    name: str = options["name"]
    wrong = ""
    if name not in NAMES:
        wrong = f"unknown codec {name!r:.80}{nearest(name, NAMES)}; known codecs: {', '.join(NAMES)}"
    elif before and NAMES.index(name) <= NAMES.index(before[-1]):
        wrong = f"{name!r} cannot come after {before[-1]!r}; the order is {', '.join(NAMES)}, each once"
    elif name == "mac" and "aes-gcm" in before:
        wrong = "'mac' cannot come after 'aes-gcm', which authenticates records itself; remove one"
    if wrong:
        raise ConfigError(f"{place.path}: {wrong}", field=place.path)
    return name


def _with(settings: ChainSettings, options: Mapping[str, Any], place: Place) -> ChainSettings:
    """The chain with one more codec. Raises ConfigError."""
    name = options["name"]
    module = "zstandard" if name == "zstd" else "cryptography"
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{place.path}: {name!r} needs the Python package {module!r}, which is not installed: {install('codecs')}",
            field=place.path,
        )
    if name == "zstd":
        zstd = structs.read(_Zstd, options, place)
        return settings._replace(zstd=ZstdOptions(zstd.level, zstd.planes))
    first, *old = _read_keys(structs.read(_Keyed, options, place), place)
    settings = settings._replace(old_keys=tuple(old))
    return settings._replace(master_key=first) if name == "aes-gcm" else settings._replace(mac_key=first)


def _read_keys(options: _Keyed, place: Place) -> list[bytes]:
    """The keys of `key_file`, or of `key_files`: the first one writes, all of them read."""
    file, files = options.key_file, options.key_files
    if files is None:
        if not file:
            raise place.wrong("key_file", file, "must be the path of a file with the key")
        return [_read_key(os.path.expanduser(file), place.at("key_file"))]
    if file is not None:
        raise place.hidden("key_file", "key_files is given too; give one of them")
    if not 0 < len(files) <= MOST_KEYS or not all(isinstance(file, str) and file for file in files):
        must = f"must be a list of 1 to {MOST_KEYS} paths of files with a key each, the key for new records first"
        raise place.wrong("key_files", files, must)
    keys = [
        _read_key(os.path.expanduser(file), f"{place.at('key_files')}[{i}]") for i, file in enumerate(files)
    ]
    if len(set(keys)) < len(keys):
        raise place.hidden("key_files", "two files hold the same key; remove one")
    return keys


def _read_key(path: str, field: str) -> bytes:
    key = read_token_file(path, field)
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{field}: {path} holds {len(key)} characters, but a key must have at least {MIN_KEY_CHARS}; make one with"
            " openssl rand -hex 32",
            field=field,
        )
    return key.encode()


# -- seals: codecs that prove who wrote a record -------------------------------------------------------------

AES_GCM, MAC = 5, 6
SEALS = (AES_GCM, MAC)
ID_BYTES, NONCE_BYTES, TAG_BYTES = 8, 12, 16
SEAL_BYTES = ID_BYTES + NONCE_BYTES + TAG_BYTES
"""Maximum number of bytes that a seal adds."""
WRONG_KEY = "wrong_key"
MOST_DERIVED = 4096
_INFO = {AES_GCM: b"kvstrata aes-gcm 2", MAC: b"kvstrata mac 1"}
_STORED_CRC = slice(96, 100)
_OUTER_CRC_AT = 252
_INNER_AT = 256
_ROW_BYTES = 16


class CannotDecode(Exception):
    """A record that may be sound but cannot be decoded by this server. `reason` is the reason code for outcomes."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class BadRecord(Exception):
    """The stored bytes cannot have been written by the codecs that the record names."""


class Seals:
    """The keys of one adapter. Any number of threads may use it at the same time."""

    def __init__(self, settings: ChainSettings) -> None:
        self.writes = MAC if settings.mac_key else AES_GCM if settings.master_key else 0
        """The codec with which records are written; 0: none."""
        self._texts: dict[bytes, bytes] = {}
        """Texts of the keys, by key id; the key for writing comes first."""
        self._derived: dict[tuple[int, bytes, bytes], bytes] = {}
        for text in settings.keys:
            self._texts[_derive(text, b"kvstrata key id 1")[:ID_BYTES]] = text

    def write(
        self, identity: bytes, plain: memoryview, record: memoryview, start: int, n_sections: int
    ) -> None:
        """Write everything after the headers, which are in place; `plain` may already lie at its place in `record`."""
        key_id, nonce = next(iter(self._texts)), os.urandom(NONCE_BYTES)
        cipher = _cipher(self._key(self.writes, key_id, identity), nonce).encryptor()
        at = start + ID_BYTES + NONCE_BYTES
        record[start:at] = key_id + nonce
        cipher.authenticate_additional_data(_associated_data(record, n_sections) + key_id)
        if self.writes == MAC:
            body = record[at : len(record) - TAG_BYTES]
            cipher.authenticate_additional_data(body)
        else:
            # The library needs spare bytes after the ciphertext; the bytes for the tag are there.
            cipher.update_into(plain, record[at:])
        cipher.finalize()
        record[len(record) - TAG_BYTES :] = cipher.tag

    def read(
        self, codec: int, identity: bytes, stored: memoryview, start: int, n_sections: int
    ) -> memoryview:
        """Check the bytes that a codec of this module wrote, decrypt them in place, and return that codec's input.

        Raises BadRecord, or CannotDecode if they were written with an unknown key, or do not authenticate.
        """
        at, end = start + ID_BYTES + NONCE_BYTES, len(stored) - TAG_BYTES
        if end < at:
            raise BadRecord("too short for a nonce and a tag")
        key_id = bytes(stored[start : start + ID_BYTES])
        if key_id not in self._texts:
            raise CannotDecode(WRONG_KEY, f"written with another key ({key_id.hex()})")
        nonce, tag, body = bytes(stored[at - NONCE_BYTES : at]), bytes(stored[end:]), stored[at:end]
        headers = _associated_data(stored, n_sections) + key_id
        key = self._key(codec, key_id, identity)
        if not _opens(key, nonce, tag, headers, body, in_place=None if codec == MAC else stored[at:]):
            raise CannotDecode(
                UNAUTHENTICATED, "its tag is wrong: it was changed, or written without its key"
            )
        return body

    def _key(self, codec: int, key_id: bytes, identity: bytes) -> bytes:
        """The 256-bit key of one identity, and so of one tenant."""
        name = codec, key_id, identity
        key = self._derived.get(name)
        if key is None:
            key = _derive(self._texts[key_id], _INFO[codec] + identity)
            if len(self._derived) >= MOST_DERIVED:
                self._derived.clear()
            self._derived[name] = key
        return key


def _opens(
    key: bytes, nonce: bytes, tag: bytes, headers: bytes, body: memoryview, *, in_place: memoryview | None
) -> bool:
    """Whether the tag is right. `in_place` gets the decrypted body."""
    from cryptography.exceptions import InvalidTag

    cipher = _cipher(key, nonce, tag).decryptor()
    cipher.authenticate_additional_data(headers)
    if in_place is None:
        cipher.authenticate_additional_data(body)
    else:
        cipher.update_into(body, in_place)
    try:
        cipher.finalize()
    except InvalidTag:
        return False
    return True


def _cipher(key: bytes, nonce: bytes, tag: bytes | None = None) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(nonce, tag))


def _derive(text: bytes, info: bytes) -> bytes:
    """HKDF-SHA-256 of a key file's text."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=info).derive(text)


def _associated_data(record: memoryview, n_sections: int) -> bytes:
    """Both headers and the section table, without the two fields that are computed after the seal."""
    outer = bytearray(record[:_OUTER_CRC_AT])
    outer[_STORED_CRC] = bytes(4)
    return bytes(outer) + bytes(record[_INNER_AT : 2 * _INNER_AT + _ROW_BYTES * n_sections])


# -- encoding and decoding one record ------------------------------------------------------------------------

PLANES2, ZSTD = 2, 3
SLAB_BYTES = 1 << 20
RAW_SLAB = 1 << 31
_LENGTH = struct.Struct("<Q")
NO_PROOF = "written without a key, so anybody who can write to this storage may have made it"


class _Tools:
    """The buffers and zstd contexts that one thread needs while it encodes or decodes."""

    def __init__(self, level: int, has_zstd: bool) -> None:
        if has_zstd:
            import zstandard

            self.compressor = zstandard.ZstdCompressor(level=level)
            self.decompressor = zstandard.ZstdDecompressor(max_window_size=SLAB_BYTES)
        self.slab = bytearray(SLAB_BYTES)


class Chain:
    """The codecs of one adapter. It decodes with any codec that a record names, if library and key are available."""

    def __init__(self, settings: ChainSettings) -> None:
        self.settings = settings
        self._tools: collections.deque[_Tools] = collections.deque()
        """Unused tools, kept because making them is expensive."""
        self._has_zstd = importlib.util.find_spec("zstandard") is not None
        self.seals = Seals(settings)

    def cannot_decode(self, codecs: bytes) -> str:
        """The short reason why a record with these codec numbers cannot be decoded here; empty if it can."""
        if any(number not in (PLANES2, ZSTD, *SEALS) for number in codecs) or list(codecs) != sorted(
            set(codecs)
        ):
            return "codec_unknown"
        sealed = sum(number in SEALS for number in codecs)
        if (PLANES2 in codecs and ZSTD not in codecs) or sealed > 1:
            return "codec_unknown"
        if self.settings.keys and not sealed:
            return UNAUTHENTICATED
        if ZSTD in codecs and not self._has_zstd:
            return "codec_missing"
        if sealed and not self.settings.keys:
            return "no_key"
        return ""

    def staging_bytes(self, record_bytes: int) -> int:
        """Bytes that `encode` needs in the worst case for a record of this length."""
        slabs = -(-record_bytes // SLAB_BYTES)
        return record_bytes + SEAL_BYTES + _LENGTH.size + 4 * slabs

    # -- encoding ------------------------------------------------------------------------------------------

    def encode(self, source: memoryview, target: memoryview, element_bytes_of: Callable[[bytes], int]) -> int:
        """Encode the record `source` into `target`, which is `staging_bytes` long; returns the result's length.

        The length is 0 if no codec changed the record; store it as it is then.  (zstd is skipped if it would not make
        the record shorter.)  `element_bytes_of(slice digest)`: element size of the payload in bytes.
        """
        source_at, source_bytes = buffer_address(source), len(source)
        header = core.record_header(source_at, source_bytes)
        start, n = header.header_bytes, header.payload_bytes
        payload = source[start : start + n]
        zstd, seal = self.settings.zstd, self.seals.writes
        body_at = start + (SEAL_BYTES - TAG_BYTES if seal else 0)
        codecs = b""
        body_bytes = len(payload)
        if zstd is not None:
            splits = (zstd.planes or element_bytes_of(header.slice_digest)) == 2
            compressed = self._compress(payload, target[body_at : body_at + _frame_bytes(body_bytes)], splits)
            if compressed < body_bytes:
                codecs = bytes([PLANES2, ZSTD] if splits else [ZSTD])
                body_bytes = compressed
                payload = target[body_at : body_at + body_bytes]
        if not codecs and not seal:
            return 0
        at = buffer_address(target, writable=True)
        stored_bytes = body_bytes
        if seal != AES_GCM and ZSTD not in codecs:
            core.libc_copy_at(buffer_address(target) + body_at, buffer_address(payload), body_bytes)
        if seal:
            codecs += bytes([seal])
            stored_bytes += SEAL_BYTES
            core.write_encoded_header(at, len(target), source_at, source_bytes, codecs, stored_bytes, 0)
            self.seals.write(
                header.identity, payload, target[: start + stored_bytes], start, len(header.sections)
            )
        stored_crc = core.crc32c_at(at + start, stored_bytes)
        core.write_encoded_header(at, len(target), source_at, source_bytes, codecs, stored_bytes, stored_crc)
        return start + stored_bytes

    def _compress(self, payload: memoryview, out: memoryview, splits: bool) -> int:
        """Compress `payload` with zstd into `out`; returns the number of bytes written."""
        tools = self._take_tools()
        n = len(payload)
        table_at, at = _LENGTH.size, _LENGTH.size + 4 * -(-n // SLAB_BYTES)
        _LENGTH.pack_into(out, 0, n)
        for begin in range(0, n, SLAB_BYTES):
            slab = payload[begin : begin + SLAB_BYTES]
            if splits:
                planes = memoryview(tools.slab)[: len(slab)]
                split_planes(planes, slab)
                slab = planes
            reader = tools.compressor.stream_reader(slab, size=len(slab))
            size = _fill(reader, out[at : at + len(slab) - 1])
            if size < 0:  # compression would not make the slab shorter
                out[at : at + len(slab)] = slab
                size = len(slab) | RAW_SLAB
            struct.pack_into("<I", out, table_at, size)
            table_at += 4
            at += size & ~RAW_SLAB
        self._tools.append(tools)
        return at

    # -- decoding ------------------------------------------------------------------------------------------

    def decode(self, stored: memoryview, target: memoryview, key: bytes) -> None:
        """Decode the record at the start of `stored`, which is overwritten, into `target`, and verify it there.

        Raises BadRecord or CannotDecode; CannotDecode also if `target` is shorter than the record.
        """
        stored_at = buffer_address(stored, writable=True)
        try:
            header = core.record_header(stored_at, len(stored))
        except RecordError as error:
            raise BadRecord(str(error)) from None
        start, n = header.header_bytes, header.payload_bytes
        stored = stored[: start + header.stored_bytes]
        if reason := self.cannot_decode(header.codecs):
            raise CannotDecode(
                reason, NO_PROOF if reason == UNAUTHENTICATED else f"codecs {list(header.codecs)}"
            )
        if len(target) < start + n:
            raise CannotDecode(LENGTH, f"{len(target)} bytes were reserved for {start + n}")
        target = target[: start + n]
        body = stored[start:]
        for codec in header.codecs:
            if codec in SEALS:
                body = self.seals.read(codec, header.identity, stored, start, len(header.sections))
        if ZSTD in header.codecs:
            self._decompress(body, target[start:], PLANES2 in header.codecs)
        elif len(body) == n:
            core.libc_copy_at(buffer_address(target, writable=True) + start, buffer_address(body), n)
        else:
            raise BadRecord(f"{len(body)} bytes decoded instead of {n}")
        target_at = buffer_address(target, writable=True)
        core.write_decoded_header(target_at, len(target), stored_at, len(stored))
        if core.verify_record(target_at, len(target), key) != CopyOutcome.OK:
            why = core.explain_record(target_at, len(target), key)
            _clear(target)
            raise BadRecord(f"decoded to other bytes than the original: {why}")

    def _decompress(self, body: memoryview, out: memoryview, joins: bool) -> None:
        import zstandard

        n = len(out)
        slabs = -(-n // SLAB_BYTES)
        table_at, at = _LENGTH.size, _LENGTH.size + 4 * slabs
        if len(body) < at or _LENGTH.unpack_from(body, 0)[0] != n:
            raise BadRecord("zstd: the frame has another length than the payload")
        tools = self._take_tools()
        try:
            for begin in range(0, n, SLAB_BYTES):
                slab = out[begin : begin + SLAB_BYTES]
                (size,) = struct.unpack_from("<I", body, table_at)
                table_at += 4
                packed = body[at : at + (size & ~RAW_SLAB)]
                at += size & ~RAW_SLAB
                planes = memoryview(tools.slab)[: len(slab)] if joins else slab
                if size & RAW_SLAB:
                    if len(packed) != len(slab):
                        raise BadRecord("zstd: an uncompressed slab has another length")
                    planes[:] = packed
                elif _fill(tools.decompressor.stream_reader(packed), planes) != len(slab):
                    raise BadRecord("zstd: a slab decodes to another length")
                if joins:
                    join_planes(slab, planes)
        except zstandard.ZstdError as error:
            raise BadRecord(f"zstd: {error}") from None
        finally:
            self._tools.append(tools)
        if at != len(body):
            raise BadRecord("zstd: bytes are left over")

    def _take_tools(self) -> _Tools:
        try:
            return self._tools.pop()
        except IndexError:
            return _Tools(self.settings.zstd.level if self.settings.zstd is not None else 1, self._has_zstd)


def _frame_bytes(n: int) -> int:
    """Maximum length of the zstd codec's result for n bytes."""
    return _LENGTH.size + 4 * -(-n // SLAB_BYTES) + n


def _clear(target: memoryview) -> None:
    """Overwrite the magic, so that the target is not taken for a record."""
    target[:8] = bytes(8)


def _fill(reader: Any, out: memoryview) -> int:
    """Fill `out` from the reader. Returns the number of bytes; -1 if the reader has more than fit."""
    done = 0
    while done < len(out):
        count = reader.readinto(out[done:])
        if count == 0:
            return done
        done += count
    return -1 if reader.read(1) else done


# -- batches ---------------------------------------------------------------------------------------------------

STAGING = "staging"
"""The reason of an item for which staging had no space and could not get any."""


class Codec:
    """Encodes records put into one medium, and decodes records loaded from it. Belongs to the event loop."""

    def __init__(
        self, name: str, settings: ChainSettings, *, staging_bytes: int = 256 << 20, workers: int = 2
    ) -> None:
        """`name` of the tier. `workers` threads encode and decode."""
        self.name = name
        self.element_bytes_of: Callable[[bytes], int] = two_bytes
        """Slice digest → element size in bytes of its payloads."""
        self.counts: collections.Counter[str] = collections.Counter()
        """Number of records (bytes if the name says so) by outcome, counted at each put or load."""
        self._chain = Chain(settings)
        self._staging = Staging(staging_bytes)
        self._lanes = Lanes(f"{name[:5]}-codec", num_workers=workers)
        self._undecodable: set[str] = set()
        """The reasons for which records could not be decoded that were logged already."""

    def stats(self) -> dict[str, int]:
        """The counters."""
        return {"staging_used_bytes": self._staging.used_bytes, **self.counts}

    async def close(self) -> None:
        """End the threads. REQUIRES: no batch is under way. Idempotent."""
        await self._lanes.close()

    async def _room(
        self, length: int, for_put: bool, flush: Callable[[], Awaitable[None]]
    ) -> tuple[Block | None, str]:
        """Staging for a record of this length in L1, or the reason why there is none.

        `flush` is awaited before a wait: space may become free only when the records before this one leave staging.
        """
        staging, need_bytes = self._staging, self._chain.staging_bytes(length)
        if not staging.fits(need_bytes, for_put=for_put):
            return None, STAGING_TOO_SMALL
        block = staging.take_now(need_bytes, for_put=for_put)
        if block is None:
            await flush()
            block = await staging.take(need_bytes, for_put=for_put)
        return block, STAGING

    # -- put -----------------------------------------------------------------------------------------------

    async def put(self, medium: StorageAdapter, items: Sequence[Item]) -> None:
        """Encode the records that the medium lacks, and put them into it. See `StorageAdapter.put`."""
        staged: list[tuple[Item, asyncio.Future[Item]]] = []

        async def flush() -> None:
            batch, staged[:] = list(staged), []
            await self._put_staged(medium, batch)

        presences = await medium.exists(b"".join([item.key for item in items]), Ask())
        for item, presence in zip(items, presences, strict=True):
            if presence == Presence.PRESENT:
                item.settle(Outcome.EXISTS)
                continue
            block, why = await self._room(item.hold.length, True, flush)
            work = None
            if block is not None:
                why = QUEUE_FULL
                work = self._lanes.submit(Lane.PUT, functools.partial(self._encode, item, block))
            if work is None:
                item.settle(Outcome.FAILED if why == STAGING_TOO_SMALL else Outcome.THROTTLED, why)
            else:
                staged.append((item, work))
            block = work = None  # the next record may wait for this one's block
        await flush()

    def _encode(self, item: Item, block: Block) -> Item:
        """In a thread: encode the record into the block.

        Returns the item to put instead; the same one, with its hold, if the record is to be stored as it is.
        """
        length = -1
        try:
            with item.hold.view() as source:
                length = self._chain.encode(source, block.view(block.room), self.element_bytes_of)
        finally:
            if length:
                item.hold.drop()
        if not length:
            return item
        block.shrink(length)
        return Item(item.key, cast("Hold", StagingHold(block, item.key, length)))

    async def _put_staged(
        self, medium: StorageAdapter, staged: list[tuple[Item, asyncio.Future[Item]]]
    ) -> None:
        """Wait until these items are encoded, and put them."""
        ended = await asyncio.gather(*(work for _, work in staged), return_exceptions=True)
        batch: list[tuple[Item, Item]] = []
        for (item, _), encoded in zip(staged, ended, strict=True):
            if isinstance(encoded, BaseException):
                item.outcome, item.reason = Outcome.FAILED, CODEC
                self.counts["encode_failed"] += 1
                text = "%s: a record cannot be encoded: %s"
                _thinning.log(log, logging.ERROR, f"encode {self.name}", text, self.name, str(encoded))
            else:
                batch.append((item, encoded))
        if batch:
            await medium.put([encoded for _, encoded in batch])
        for item, encoded in batch:
            if encoded is item:
                self.counts["incompressible"] += 1
                continue
            item.outcome, item.reason = encoded.outcome, encoded.reason
            if item.outcome is Outcome.STORED:
                self.counts["encoded"] += 1
                self.counts["encoded_from_bytes"] += item.hold.length
                self.counts["encoded_to_bytes"] += encoded.hold.length

    # -- load ----------------------------------------------------------------------------------------------

    async def load(self, medium: StorageAdapter, items: Sequence[Item]) -> None:
        """Load from the medium into staging, then decode into the extents. See `StorageAdapter.load`."""
        staged: list[tuple[Item, Block]] = []

        async def flush() -> None:
            batch, staged[:] = list(staged), []
            if batch:
                await self._load_staged(medium, batch)

        for item in items:
            block, why = await self._room(item.hold.length, False, flush)
            if block is not None:
                staged.append((item, block))
            else:
                item.settle(Outcome.FAILED, why)
            block = None  # the next record may wait for this one's block
        await flush()

    async def _load_staged(self, medium: StorageAdapter, staged: list[tuple[Item, Block]]) -> None:
        """Load these items into their blocks, and decode them; takes ownership of the list."""
        loads = [
            Item(item.key, cast("Hold", StagingHold(block, item.key, block.room)), item.ask)
            for item, block in staged
        ]
        await medium.load(loads)
        decoding: list[tuple[Item, asyncio.Future[None]]] = []
        for (item, block), load in zip(staged, loads, strict=True):
            if load.outcome is not Outcome.LOADED:
                item.settle(load.outcome, load.reason)
            elif work := self._lanes.submit(Lane.LOAD, functools.partial(self._decode, item, block)):
                decoding.append((item, work))
            else:
                item.settle(Outcome.FAILED, THROTTLED)
        staged.clear()
        bad: list[bytes] = []
        for error in await asyncio.gather(*(work for _, work in decoding), return_exceptions=True):
            if error is not None:
                log_broken_contract(self.name, "a codec", error)
        for item, _ in decoding:
            is_corrupt = item.outcome is Outcome.CORRUPT
            loaded = item.outcome is Outcome.LOADED
            self.counts["decoded" if loaded else "decoded_corrupt" if is_corrupt else item.reason] += 1
            if is_corrupt or item.reason in (UNAUTHENTICATED, LENGTH):
                bad.append(item.key)
        if bad:
            await medium.delete(b"".join(bad))

    def _decode(self, item: Item, block: Block) -> None:
        """In a thread: decode the stored record at the start of the block into the extent, and settle the item.

        No log record keeps the error, whose traceback refers to the block.
        """
        outcome, reason = Outcome.FAILED, CODEC
        try:
            with item.hold.view() as target:
                self._chain.decode(block.view(block.room), target, item.key)
            outcome, reason = Outcome.LOADED, ""
        except CannotDecode as error:
            reason = error.reason
            if reason not in self._undecodable:  # if the storage has other codecs, every record fails so
                self._undecodable.add(reason)
                what = "%s: record %s: %s; more such records are only counted (%s). Give all its servers the same codec"
                log.warning(what, self.name, item.key.hex()[:16], str(error), reason)
        except BadRecord as error:
            outcome = Outcome.CORRUPT
            text = "%s: removing the corrupt record %s: %s"
            _thinning.log(log, logging.WARNING, self.name, text, self.name, item.key.hex()[:16], str(error))
        finally:
            item.settle(outcome, reason)
