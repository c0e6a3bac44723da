"""Consuming: from a delivery to a handler, and from what the handler decided to what the broker is told."""
