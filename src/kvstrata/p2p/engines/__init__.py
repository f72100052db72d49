"""Engines that read one-sidedly out of the registered memory of another instance; see base.py for the contract."""
