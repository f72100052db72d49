"""Reading the L1 of other instances, and lending ours to them."""
