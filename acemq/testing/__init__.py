"""What helps to test: the conformance kit, with which anyone may prove a transport (`acemq.testing.conformance`).

It needs pytest: `pip install "acemq[testing]"`.
"""
