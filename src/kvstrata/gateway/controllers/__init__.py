"""What controllers know of a prompt's KV: in shared L1s, in L2 tiers and at peers."""
