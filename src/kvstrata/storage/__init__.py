"""L2: the storage contract and its adapters."""
