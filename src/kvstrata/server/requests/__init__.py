"""The requests of clients, and the leases and reservations that they leave behind."""
