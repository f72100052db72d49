"""What clients ask for, and what a request leaves behind."""
