"""Stores, one file or folder a kind; loaded by name, so that a missing extra is one clear error."""
