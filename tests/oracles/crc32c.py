"""CRC32C by its definition, bit by bit: the twin of the native checksum."""

from __future__ import annotations

POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes, crc: int = 0) -> int:
    register = crc ^ 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (POLYNOMIAL if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def _table() -> list[int]:
    return [crc32c(bytes([byte]), 0xFFFFFFFF) ^ 0xFFFFFFFF for byte in range(256)]


_TABLE = _table()


def crc32c_fast(data: bytes, crc: int = 0) -> int:
    """Return the same by a table, for inputs of more than a few hundred bytes."""
    register = crc ^ 0xFFFFFFFF
    for byte in data:
        register = (register >> 8) ^ _TABLE[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF
