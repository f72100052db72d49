"""Our connector for the simulated engine: both sides of the vLLM connector, with blocks in plain memory."""
