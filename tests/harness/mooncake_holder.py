"""The child process of `mooncake.Holder`; its argument is the JSON for Mooncake's setup."""

from __future__ import annotations

import json
import sys

from mooncake.store import MooncakeDistributedStore

from tests.harness.child import serve


def main() -> None:
    store = MooncakeDistributedStore()
    code = store.setup(json.loads(sys.argv[1]))
    if code:
        raise SystemExit(f"Mooncake's setup answered {code}")

    def put(name: str, value: str) -> None:
        remove(name)
        if value and (code := store.put(name, bytes.fromhex(value))):
            raise OSError(code, f"put {name}")

    def remove(name: str) -> None:
        store.remove(name, True)

    serve(
        {
            "get": lambda name: store.get(name).hex(),
            "put": put,
            "remove": remove,
            "remove_all": lambda: store.remove_all(True),
        }
    )


if __name__ == "__main__":
    main()
