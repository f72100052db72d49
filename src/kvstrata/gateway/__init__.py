"""The gateway: an HTTP proxy before serving engines that speaks their OpenAI-compatible API."""
