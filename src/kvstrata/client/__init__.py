"""What runs inside an engine process: attach, requests, copies, breaker.  Imports nothing heavy."""

from kvstrata.client.calls import (
    Identity,
    LoadItem,
    LoadJob,
    LookupCall,
    LookupResult,
    StoreJob,
    StoreOutcome,
)
from kvstrata.client.client import CacheClient

__all__ = [
    "CacheClient",
    "Identity",
    "LoadItem",
    "LoadJob",
    "LookupCall",
    "LookupResult",
    "StoreJob",
    "StoreOutcome",
]
