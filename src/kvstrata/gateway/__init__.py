"""The gateway: an HTTP proxy in front of serving engines that speaks their OpenAI-compatible API."""
