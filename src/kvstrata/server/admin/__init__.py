"""What an admin can see and do: status, explain, prewarm, clear, stranded sessions."""
