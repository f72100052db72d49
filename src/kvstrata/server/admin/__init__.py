"""The admin operations of an instance: status, explain, prewarm, clear, stranded sessions."""
