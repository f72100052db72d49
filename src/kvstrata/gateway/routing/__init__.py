"""Which engine gets a request: pure decisions over measured rates, own queues and what is known of cached KV."""
