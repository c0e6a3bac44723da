"""Publishing: from a payload to a message that the broker has confirmed."""
