"""Topologies as values: routing, names, and everything that can be said about them without a broker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemq.errors import ConfigurationError, TopologyError
from acemq.retry import RetryPolicy
from acemq.topology import Binding, Exchange, Queue, Topology, dead_letters_of, matches, parked_of, rung_of

# Topic patterns, as RabbitMQ matches them (measured)


@pytest.mark.parametrize(
    ("pattern", "key", "matched"),
    [
        ("order.*", "order.placed", True),
        ("order.*", "order.", True),
        ("order.*", "order", False),
        ("order.*", "order.placed.eu", False),
        ("#", "", True),
        ("#", "a", True),
        ("#", "a.b.c", True),
        ("#", ".", True),
        ("*", "", False),
        ("*", "a", True),
        ("*", ".", False),
        ("*.*", ".", True),
        ("*.*", "a.", True),
        ("a.#.z", "a.z", True),
        ("a.#.z", "a.b.z", True),
        ("a.#.z", "a.b.c.z", True),
        ("a.#.z", "a..z", True),
        ("a.#.z", "a", False),
        ("a.#.z", "a.z.b", False),
        ("a.#", "a", True),
        ("#.a", "a", True),
        ("#.a.#", "b.a.c", True),
        ("#.#", "", True),
        ("#.*", "", False),
        ("#.*", "a", True),
        ("*.#", "a.b.c", True),
        ("or*", "order", False),
        ("or*", "or*", True),
        ("or#", "or", False),
        ("a.**", "a.b", False),
        ("", "", True),
        ("", "a", False),
        ("Order", "order", False),
        ("grüße.*", "grüße.1", True),
    ],
)
def test_topic_patterns_match_as_on_rabbitmq(pattern: str, key: str, matched: bool) -> None:
    assert matches(pattern, key) is matched


def naively(pattern: list[str], words: list[str]) -> bool:
    """By backtracking, straight from the definition."""
    if not pattern:
        return not words
    head, *rest = pattern
    if head == "#":
        return any(naively(rest, words[taken:]) for taken in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and naively(rest, words[1:])


@given(
    st.lists(st.sampled_from(["a", "b", "", "*", "#", "a*"]), max_size=6),
    st.lists(st.sampled_from(["a", "b", "", "a*"]), max_size=7),
)
def test_matching_agrees_with_the_definition(pattern: list[str], words: list[str]) -> None:
    # [""] written with dots is the empty text, which has no words at all.
    as_read = [] if pattern == [""] else pattern
    assert matches(".".join(pattern), ".".join(words)) is naively(as_read, [] if words == [""] else words)


def test_a_pattern_of_many_hashes_is_matched_in_no_time() -> None:
    # Backtracking would take longer than the universe has.
    assert not matches(".".join(["#.a"] * 40), ".".join(["a"] * 200 + ["b"]))


# Names


@pytest.mark.parametrize(
    ("delay", "name"),
    [
        (timedelta(seconds=1), "q.retry.1s"),
        (timedelta(seconds=90), "q.retry.90s"),
        (timedelta(minutes=5), "q.retry.5m"),
        (timedelta(minutes=90), "q.retry.90m"),
        (timedelta(hours=1), "q.retry.1h"),
        (timedelta(days=1), "q.retry.24h"),
    ],
)
def test_a_rung_is_named_after_whole_hours_else_minutes_else_seconds(delay: timedelta, name: str) -> None:
    assert rung_of("q", delay) == name


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_two_rungs_of_one_queue_never_share_a_name(one: int, other: int) -> None:
    names = {rung_of("q", timedelta(milliseconds=one)), rung_of("q", timedelta(milliseconds=other))}
    assert len(names) == len({one, other})


@pytest.mark.parametrize(
    "name", ["", "amq.gen-1", "a\0b", "n" * 256, "ü" * 128, None, 5, "half \ud83d", "half \ud83d" * 40]
)
def test_a_name_that_some_broker_could_not_hold_is_refused(name: Any) -> None:
    for make in (
        lambda: Topology().queue(name),
        lambda: Topology().exchange(name),
        lambda: Topology().bind(name, "ex"),
        lambda: dead_letters_of(name),
        lambda: parked_of(name),
    ):
        with pytest.raises(ConfigurationError):
            make()


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127, "Orders", "orders ", "grüße"])
def test_a_name_is_kept_byte_for_byte(name: str) -> None:
    assert Topology().queue(name).queues == (Queue(name),)


@pytest.mark.parametrize("key", ["k" * 256, "a\0b", None])
def test_a_routing_key_has_255_bytes_at_most_and_may_be_empty(key: Any) -> None:
    Topology().bind("q", "ex", "")
    Topology().bind("q", "ex", "k" * 255)
    with pytest.raises(ConfigurationError):
        Topology().bind("q", "ex", key)


# What is described


WITH_RETRY = RetryPolicy.delays(timedelta(seconds=40), timedelta(minutes=1))


def test_one_queue_with_retry_is_five_queues_two_exchanges_and_three_bindings() -> None:
    """M-055."""
    described = Topology().queue("in", dead_letter=True, retry=WITH_RETRY)
    described.validate()
    home = {"x-dead-letter-exchange": "acemq.retry", "x-dead-letter-routing-key": "in"}
    found = described.describe()
    assert {d.name: (d.type, dict(d.arguments)) for d in found if d.kind == "queue"} == {
        "in": (
            "quorum",
            {
                "x-queue-type": "quorum",
                "x-dead-letter-exchange": "acemq.dlx",
                "x-dead-letter-routing-key": "in.dlq",
            },
        ),
        "in.dlq": ("classic", {}),
        "in.parked": ("classic", {}),
        "in.retry.40s": ("classic", {"x-message-ttl": 40_000, **home}),
        "in.retry.1m": ("classic", {"x-message-ttl": 60_000, **home}),
    }
    assert [(d.name, d.type) for d in found if d.kind == "exchange"] == [
        ("acemq.dlx", "direct"),
        ("acemq.retry", "direct"),
    ]
    assert {(d.name, d.exchange, d.routing_key) for d in found if d.kind == "binding"} == {
        ("in.dlq", "acemq.dlx", "in.dlq"),
        ("in.parked", "acemq.dlx", "in.parked"),
        ("in", "acemq.retry", "in"),
    }
    assert len(found) == 10
    assert all(d.durable and not d.exclusive and not d.auto_delete for d in found)


def test_a_topology_prints_as_what_a_broker_is_told() -> None:
    assert str(Topology().queue("in", retry=WITH_RETRY)) == (
        "exchange  acemq.dlx (direct)\n"
        "exchange  acemq.retry (direct)\n"
        "queue     in (quorum) x-dead-letter-exchange='acemq.dlx' x-dead-letter-routing-key='in.dlq'\n"
        "queue     in.dlq (classic)\n"
        "queue     in.parked (classic)\n"
        "queue     in.retry.40s (classic) x-dead-letter-exchange='acemq.retry' x-dead-letter-routing-key='in'"
        " x-message-ttl=40000\n"
        "queue     in.retry.1m (classic) x-dead-letter-exchange='acemq.retry' x-dead-letter-routing-key='in'"
        " x-message-ttl=60000\n"
        "binding   in.dlq <- acemq.dlx on 'in.dlq'\n"
        "binding   in.parked <- acemq.dlx on 'in.parked'\n"
        "binding   in <- acemq.retry on 'in'"
    )


def test_every_option_of_a_queue_becomes_an_argument() -> None:
    queue = Queue("q", type="classic", ttl=timedelta(seconds=1.5), max_length=10, priorities=5)
    assert queue.arguments() == {
        "x-message-ttl": 1500,
        "x-max-length": 10,
        "x-overflow": "reject-publish",
        "x-max-priority": 4,
    }


def test_native_arguments_are_those_of_rabbitmq_alone() -> None:
    described = Topology().queue("q", native={"rabbitmq": {"x-delivery-limit": 5}, "aws": {"DelaySeconds": "1"}})
    described.validate()
    assert described.queues[0].arguments() == {"x-queue-type": "quorum", "x-delivery-limit": 5}


def test_each_verb_gives_a_new_topology() -> None:
    empty = Topology()
    assert empty.queue("q").bind("q", "ex").exchange("ex", "topic") != empty
    assert empty == Topology()


def test_the_order_of_calls_does_not_matter() -> None:
    one = Topology().bind("q", "ex", "k").queue("q").exchange("ex")
    other = Topology().exchange("ex").queue("q").bind("q", "ex", "k")
    one.validate()
    assert one == other


def test_the_same_thing_twice_is_there_once() -> None:
    once = Topology().exchange("ex").queue("q", dead_letter=True).bind("q", "ex", "k")
    assert once | once == once
    assert len((once | once).describe()) == len(once.describe())


# Every problem at once


def test_a_binding_of_two_unknowns_is_one_error_with_both_problems() -> None:
    """M-052."""
    with pytest.raises(TopologyError) as found:
        Topology().bind("q1", "ex").validate()
    assert len(found.value.problems) == 2
    about_queue, about_exchange = found.value.problems
    assert "'q1'" in about_queue
    assert ".queue('q1')" in about_queue
    assert ".exchange('ex')" in about_exchange


def test_every_problem_is_told_at_once() -> None:
    troubled = (
        Topology()
        .bind("nowhere", "nothing")
        .exchange("ex", "topic")
        .exchange("ex", "fanout")
        .queue("twice", ttl=timedelta(seconds=1))
        .queue("twice", ttl=timedelta(seconds=2))
        .queue("private", type="quorum", exclusive=True)
        .queue("ranked", priorities=5)
        .queue("elsewhere", native={"kafka": {"x": 1}})
        .queue("doubly", ttl=timedelta(seconds=1), native={"rabbitmq": {"x-message-ttl": 5}})
        .queue("acemq.mine")
        .exchange("acemq.ours")
    )
    with pytest.raises(TopologyError) as found:
        troubled.validate()
    names = [
        "nowhere",
        "nothing",
        "ex",
        "twice",
        "private",
        "ranked",
        "elsewhere",
        "doubly",
        "acemq.mine",
        "acemq.ours",
    ]
    assert len(found.value.problems) == len(names)
    for name in names:
        assert any(f"'{name}'" in problem for problem in found.value.problems), name
    assert all(problem in str(found.value) for problem in found.value.problems)


def test_what_the_library_declares_itself_is_no_problem() -> None:
    Topology((Exchange("acemq.dlx"),), (Queue("q"),), (Binding("acemq.dlx", "q", "q"),)).validate()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ttl": 5}, "ttl=5"),
        ({"ttl": timedelta()}, "ttl="),
        ({"lease": timedelta(seconds=-1)}, "lease="),
        ({"max_length": 0}, "max_length=0"),
        ({"priorities": 257}, "priorities=257"),
        ({"priorities": -1}, "priorities=-1"),
        ({"priorities": "many"}, "priorities='many'"),
    ],
)
def test_a_bad_option_of_a_queue_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Topology().queue("q", **options)


def test_an_unknown_option_or_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="durabel"):
        Topology().queue("q", durabel=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigurationError, match="kind='header'"):
        Topology().exchange("ex", "header")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("private", [{"exclusive": True}, {"auto_delete": True}, {"durable": False}])
def test_a_private_queue_is_classic_unless_it_is_told_otherwise(private: dict[str, Any]) -> None:
    assert Topology().queue("q", **private).queues[0].type == "classic"
    assert Topology().queue("q").queues[0].type == "quorum"
