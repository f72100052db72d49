"""Assertions of the shipped suite tell what they compared, as those of test files do."""

import pytest

pytest.register_assert_rewrite("kvstrata.testing.adapter_contract", "kvstrata.testing.strategies")
