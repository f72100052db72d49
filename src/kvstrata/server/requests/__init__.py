"""The requests of clients, and the leases, reservations and promises that outlive them."""
