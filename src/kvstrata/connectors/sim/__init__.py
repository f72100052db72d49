"""Our connector for the simulated engine: the two sides of the one for vLLM, which copy blocks of plain memory."""
