"""Lets pytest explain failed assertions of the shipped suite as it does in test files."""

import pytest

pytest.register_assert_rewrite("kvstrata.testing.adapter_contract", "kvstrata.testing.strategies")
