"""How fast acemq is, beside what else there is: `make bench`, or `make bench-quick` for a first look in two minutes.

Only ratios are promised. Every run is a fresh process, the candidates of one measure take turns within each round, and
a target holds when the median of its ratios over all rounds meets it. What is promised stands as data beside the
measure it belongs to: `rabbitmq.py`, `memory.py`, `imports.py`.
"""
