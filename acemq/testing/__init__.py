"""What helps to test: a harness for programs (`MessageHarness`), a message for a handler alone (`message`), and the
conformance kit, with which anyone may prove a transport (`acemq.testing.conformance`).

The kit needs pytest: `pip install "acemq[testing]"`. The rest works with any runner.
"""

from acemq.testing.harness import Handling, MessageHarness, Sent, message

__all__ = ["Handling", "MessageHarness", "Sent", "message"]
