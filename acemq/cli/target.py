"""Which broker or database a command speaks to, and which topology is meant: option, variable, or `[tool.acemq]`."""

from __future__ import annotations

import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from acemq.errors import ConfigurationError
from acemq.health import without_secrets
from acemq.topology import Topology

URL_VARIABLE, TOPOLOGY_VARIABLE = "ACEMQ_URL", "ACEMQ_TOPOLOGY"
DATABASE_VARIABLE = "ACEMQ_DATABASE_URL"


def url_of(option: str | None) -> str:
    """Refused when nobody says which."""
    url = option or os.environ.get(URL_VARIABLE) or _setting("url")
    if not url:
        raise ConfigurationError(
            f"no broker is named; give --url, set {URL_VARIABLE}, or write url under [tool.acemq] in pyproject.toml"
        )
    return url


def database_of(option: str | None) -> str:
    """Where an outbox is. Refused when nobody says."""
    url = option or os.environ.get(DATABASE_VARIABLE) or _setting("database")
    if not url:
        raise ConfigurationError(
            f"no database is named; give --database, set {DATABASE_VARIABLE}, or write database under [tool.acemq] in "
            "pyproject.toml"
        )
    return url


def topology_of(option: str | None) -> Topology | None:
    """The one that `module:name` names, a `Topology` or a function that returns one; `None` when nobody says which."""
    where = option or os.environ.get(TOPOLOGY_VARIABLE) or _setting("topology")
    return _load(where) if where else None


def required_topology(option: str | None) -> Topology:
    topology = topology_of(option)
    if topology is None:
        raise ConfigurationError(
            f"no topology is named; give --topology module:name, set {TOPOLOGY_VARIABLE}, "
            "or write topology under [tool.acemq] in pyproject.toml"
        )
    return topology


def _load(where: str) -> Topology:
    module, colon, name = where.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"topology {where!r} must be module:name, for example shop.queues:topology")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the program of this folder is meant
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if callable(found):
            found = found()
    except Exception as error:
        text = without_secrets(f"{type(error).__name__}: {error}")
        raise ConfigurationError(f"topology {where!r} could not be loaded from here: {text}") from error
    if not isinstance(found, Topology):
        raise ConfigurationError(f"{where!r} is a {type(found).__name__}; a Topology is wanted, or what returns one")
    return found


def _setting(name: str) -> str | None:
    try:
        read = tomllib.loads(Path("pyproject.toml").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"pyproject.toml cannot be read: {error}") from error
    value = read.get("tool", {}).get("acemq", {}).get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"[tool.acemq] {name} in pyproject.toml must be text")
    return value
