from __future__ import annotations

import pytest

from acemq.errors import ConfigurationError, MissingExtraError
from acemq.transports import rabbitmq
from acemq.transports.rabbitmq.address import Address, Host, parse


@pytest.mark.parametrize(
    ("url", "hosts", "vhost", "user", "password"),
    [
        ("amqp://localhost", [("localhost", 5672)], "/", "guest", "guest"),
        ("amqps://localhost/", [("localhost", 5671)], "/", "guest", "guest"),
        ("amqp://a:b@h:1/v", [("h", 1)], "v", "a", "b"),
        ("amqp://a:b@h1:1,h2,h3:65535/%2F", [("h1", 1), ("h2", 5672), ("h3", 65535)], "/", "a", "b"),
        ("amqp://h//", [("h", 5672)], "/", "guest", "guest"),
        ("amqp://[::1]:5673,[fe80::1]/a%2Fb", [("::1", 5673), ("fe80::1", 5672)], "a/b", "guest", "guest"),
        ("amqp://u%40x:p%40%2F%3A%23%25@h", [("h", 5672)], "/", "u@x", "p@/:#%"),
        ("amqp://u:%C3%A9@h/%C3%A9", [("h", 5672)], "é", "u", "é"),
        ("amqp://u:a:b@h", [("h", 5672)], "/", "u", "a:b"),
    ],
)
def test_urls_are_read(url: str, hosts: list[tuple[str, int]], vhost: str, user: str, password: str) -> None:
    address = parse(url)
    assert [(host.name, host.port) for host in address.hosts] == hosts
    assert (address.vhost, address.user, address.password) == (vhost, user, password)
    assert address.tls is url.startswith("amqps")
    assert address.heartbeat == 15


def test_heartbeat_is_a_query_key() -> None:
    assert parse("amqp://h?heartbeat=5").heartbeat == 5
    assert parse("amqp://h/v?heartbeat=2").heartbeat == 2


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("amqp://h?hartbeat=5", "hartbeat"),
        ("amqp://h?heartbeat=1", "heartbeat"),
        ("amqp://h?heartbeat=", "heartbeat"),
        ("amqp://h?heartbeat=2.5", "heartbeat"),
        ("amqp://h?heartbeat=5&heartbeat=6", "heartbeat"),
        ("amqp://h?heartbeat=65535", "heartbeat"),
        ("amqp://", "host"),
        ("amqp:///v", "host"),
        ("amqp://h1,,h2", "host"),
        ("amqp://h:0", "port"),
        ("amqp://h:65536", "port"),
        ("amqp://h:x", "port"),
        ("amqp://h:", "port"),
        ("amqp://[::1", "host"),
        ("amqp://h h", "white space"),
        ("amqp://h1, h2", "white space"),
        ("amqp://h/v#x", "#"),
        ("amqp://u:p%zz@h", "password"),
        ("amqp://h/%ff", "virtual host"),
        ("http://h", "amqp://"),
        ("h:5672", "amqp://"),
    ],
)
def test_what_is_wrong_with_a_url_is_named(url: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        rabbitmq.transport(url)


@pytest.mark.parametrize(
    "url",
    [
        "amqp://user:sec/ret@host",
        "amqp://user:sec?ret@host",
        "amqp://user:sec#ret@host",
        "amqp://user:se@c/ret@host",
        "amqp://user:secret",
        "amqp://us[er:secret",
        "amqp://user:sec%ret@host",
        "amqp://user:sec ret@host",
        "amqp://user:secret@host?nonsense=1",
        "amqp://user:secret@host:none",
        "http://user:secret@host",
    ],
)
def test_no_refusal_shows_a_part_of_the_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse(url)
    assert "sec" not in str(refused.value).replace("in seconds", "").replace("(seconds)", "")
    assert "ret" not in str(refused.value)


def test_an_address_shows_neither_user_nor_password() -> None:
    address = parse("amqp://someone:secret@h1,h2:1/v")
    assert "someone" not in repr(address)
    assert "secret" not in repr(address)
    assert address.endpoint(address.hosts[1]) == "h2:1/v"
    assert str(Host("::1", 5672)) == "[::1]:5672"
    broker = rabbitmq.transport("amqp://someone:secret@h1,h2:1/v")
    assert broker.state.endpoint == "h1:5672/v,h2:1/v"
    assert "secret" not in repr(broker)
    assert isinstance(address, Address)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nmae": "x"}, "nmae"),
        ({"connections": 3}, "connections"),
        ({"name": ""}, "name"),
        ({"reconnect": 5}, "reconnect"),
        ({"on_change": "x"}, "on_change"),
    ],
)
def test_options_are_refused_by_name_without_an_event_loop(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        rabbitmq.transport("amqp://h", **options)


def test_without_its_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for loaded in [name for name in sys.modules if name.startswith("acemq.transports.rabbitmq.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "aiormq", None)
    with pytest.raises(MissingExtraError, match=r"acemq\[rabbitmq\]"):
        rabbitmq.transport("amqp://h")
