"""Wrappers: adapters around adapters. Each keeps the storage contract and adds one thing."""
