"""Looks up a prompt's KV in shared L1s, in L2 tiers and at peers, by the cluster's controllers and instances."""
