"""The messages between gateways in front of the same engines."""
