"""Page tables of shared mappings."""

def map_present_pages(address: int, length: int) -> int:
    """Enter the existing pages of [address, address + length) into this process's page tables; returns their bytes.

    Pages that nobody has touched yet stay untouched. Contents do not change. Drops the GIL; takes 0.1 to 0.3 µs a page.
    REQUIRES: one shared, writable mapping covers the range until this function returns.
    Raises ValueError if `address` does not begin a page, OSError if the kernel refuses.
    """
