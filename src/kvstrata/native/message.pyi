"""A look at a frame before anything else is done with it (`ext/core/src/message/scan.h`)."""

from typing import Final

from typing_extensions import Buffer

FAULTS: Final[tuple[str, ...]]
"""Every fault that a scan may return, in the order of `ScanFault` in scan.h; the first is empty."""

class Scan:
    """Scans frames, `[C4 20 <32 bytes>] message`, whose messages have these limits: containers around one value, all
    values, bytes of one text and of one byte string.  Reads at most `elements` + 1 headers, however long the message
    is, and makes no object of them."""

    def __init__(self, *, depth: int, elements: int, text_bytes: int, binary_bytes: int) -> None:
        """Raises ValueError for a depth above 64."""

    def __call__(self, frame: Buffer) -> tuple[bytes, bytes, bytes, int, str]:
        """Scan a frame; returns (proof, op, session, seq, fault).

        `proof` is empty if the frame has none.  The next three are the leading values of the message's array, or empty
        and 0: a text, 16 bytes, a number below 2^63.  `fault` is one of `FAULTS`; nothing after it was read.
        """
