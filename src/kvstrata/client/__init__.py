"""The part of kvstrata that runs inside an engine process: it attaches, sends requests and copies chunks.

Importing it imports no torch, no engine and no server code.
"""

from kvstrata.client.client import CacheClient
from kvstrata.client.handles import (
    LoadItem,
    LoadJob,
    LookupCall,
    LookupResult,
    PromiseCall,
    StoreJob,
    StoreOutcome,
)
from kvstrata.client.identities import Identity

__all__ = [
    "CacheClient",
    "Identity",
    "LoadItem",
    "LoadJob",
    "LookupCall",
    "LookupResult",
    "PromiseCall",
    "StoreJob",
    "StoreOutcome",
]
