"""Encoding and decoding of records: the codecs, their order, and the bytes that they write (`docs/formats.md`).

This module knows no adapters and no event loop.  Any number of threads may encode and decode at the same time.

    planes2 (2)   sorts the bytes of 16-bit numbers into planes; only before zstd
    zstd (3)      in slabs of 1 MiB
    aes-gcm (5) and mac (6)   codec_seal.py

Invariants
1. Codecs are applied in the order of their numbers, each at most once; a record names those that were applied to it.
2. When `decode` returns, its target has passed the checksum of every section of the original record.
3. Whatever a record claims, `decode` allocates and writes no more than its target and one slab.
"""

from __future__ import annotations

import collections
import importlib.util
import struct
from collections.abc import Callable
from typing import Any

from kvstrata.native import core
from kvstrata.native.core import CopyOutcome, RecordError, buffer_address, join_planes, split_planes
from kvstrata.policy.reasons import LENGTH, UNAUTHENTICATED
from kvstrata.storage.wrap.codec_fields import ChainSettings
from kvstrata.storage.wrap.codec_seal import (
    AES_GCM,
    SEAL_BYTES,
    SEALS,
    TAG_BYTES,
    BadRecord,
    CannotDecode,
    Seals,
)

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
    """The codecs of one adapter. It decodes with any codec that a record names, if it has the library and the key."""

    def __init__(self, settings: ChainSettings) -> None:
        self.settings = settings
        self.encodes = settings.encodes
        self._tools: collections.deque[_Tools] = collections.deque()
        """Tools that no thread uses now; they are kept because making them is expensive."""
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
        if sealed and not self.seals.reads:
            return "no_key"
        return ""

    def staging_bytes(self, record_bytes: int) -> int:
        """Bytes that `encode` needs in the worst case for a record of this length."""
        slabs = -(-record_bytes // SLAB_BYTES)
        return record_bytes + SEAL_BYTES + _LENGTH.size + 4 * slabs

    # -- encoding ------------------------------------------------------------------------------------------

    def encode(self, source: memoryview, target: memoryview, element_bytes_of: Callable[[bytes], int]) -> int:
        """Encode the record `source` into `target`, which is `staging_bytes` long; returns the result's length.

        The length is 0 if no codec changed the record; store it as it is then.  (zstd is left out where it
        would not make the record shorter.)  `element_bytes_of(slice digest)`: bytes of a number of the payload.
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
    """The longest result of the zstd codec for n bytes."""
    return _LENGTH.size + 4 * -(-n // SLAB_BYTES) + n


def _clear(target: memoryview) -> None:
    """Overwrite the magic, so that the target is not taken for a record."""
    target[:8] = bytes(8)


def _fill(reader: Any, out: memoryview) -> int:
    """Fill `out` from the reader; returns the number of bytes, -1 if it has more than fit."""
    done = 0
    while done < len(out):
        count = reader.readinto(out[done:])
        if count == 0:
            return done
        done += count
    return -1 if reader.read(1) else done
