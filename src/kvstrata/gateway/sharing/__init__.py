"""What gateways before the same engines tell each other."""
