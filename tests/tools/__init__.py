"""Commands of contributors: they prepare environments and run the demo and soak."""
