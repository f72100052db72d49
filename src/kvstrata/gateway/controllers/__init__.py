"""Looks up a prompt's KV in L1, in L2 tiers and at peers, with the instances that the cluster's controllers list."""
