"""The CURVE keys with which a gateway connects to controllers."""

from __future__ import annotations

from kvstrata.config.gateway_controllers_model import GatewayControllersSettings
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.shared_key import SharedKey
from kvstrata.rpc.zmq_curve import ClusterKeys, new_secret, open_keys

FIELD = "controllers.curve_file"


class OwnKeys:
    """Keys of a file, of this user, or open ones; those that no file has are made once."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._secret = new_secret()
        self._shared: SharedKey | None = None

    def of(self, settings: GatewayControllersSettings, in_file: ClusterKeys | None) -> ClusterKeys:
        """The keys by these settings; `in_file`: those of `curve_file`. Raises ConfigError."""
        if in_file is not None:
            return in_file
        if settings.insecure or not settings.urls:
            return open_keys(self._secret)
        if self._shared is None:
            self._shared = SharedKey(FIELD)
            self._supervisor.spawn(self._shared.keep(), "controllers-key")
        return self._shared.of_member(self._secret)
