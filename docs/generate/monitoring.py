"""configs/kubernetes/prometheus.yaml: Prometheus' rules and the target, as objects of the Prometheus operator."""

from __future__ import annotations

import textwrap

from docs.generate.source import DOCS

RULES = DOCS.parent / "configs/prometheus"
_HEAD = """# For the Prometheus operator: its target, and the rules of configs/prometheus. Never applied to a cluster
# (docs/limits.md). Made by `make docs` from configs/prometheus and docs/generate/monitoring.py.
#   kubectl apply -f configs/kubernetes/prometheus.yaml
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: kvstrata
spec:
  # Alerts name the job `kvstrata`, which is the pods' label `app`.
  jobLabel: app
  selector:
    matchLabels: {app: kvstrata}
  podMetricsEndpoints:
    - port: http
      interval: 15s
      authorization:
        credentials: {name: kvstrata-http-token, key: token}
"""
_RULE = """---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
spec:
"""


def for_kubernetes() -> str:
    """The whole file."""
    parts = [_HEAD]
    for path in sorted(RULES.glob("*.yaml")):
        _, begin, groups = path.read_text(encoding="utf-8").partition("groups:\n")
        parts += [_RULE.format(name=path.stem), textwrap.indent(begin + groups, "  ")]
    return "".join(parts)
