"""The pages say what the code does, show only what is run, and lead where they say."""

from __future__ import annotations

import html
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import acemq
from acemq import errors, telemetry
from acemq.cli.running import ExitCode
from acemq.consuming.settling import TABLE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SNIPPETS = DOCS / "snippets"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"--8<--\n([\w.]+)\n--8<--\n")
LINK = re.compile(r"\[[^]]+\]\(([^)\s]+)\)")


def _hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = _hooks()


def page(name: str) -> str:
    """As it is before it becomes HTML: what is made from the code is in it."""
    filled: str = hooks.fill((DOCS / name).read_text())
    return filled


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each code block."""
    yield from FENCE.findall(path.read_text())


def called(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it: a link that leads nowhere, or a missing snippet, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_shows_what_is_made_from_the_code(site: Path) -> None:
    shown = _text(site / "consuming" / "index.html")
    for row in TABLE.values():
        assert row.when.replace("`", "") in shown
        assert row.text in shown
    for built in site.rglob("*.html"):
        assert "<!-- made:" not in built.read_text()
        assert "--8&lt;--" not in built.read_text()


def test_the_site_shows_the_programs_as_they_are_run(site: Path) -> None:
    assert (SNIPPETS / "orders.py").read_text().strip() in _text(site / "getting-started" / "index.html")


def test_the_site_holds_no_sources_of_ours(site: Path) -> None:
    assert not list(site.rglob("*.py"))
    assert not (site / "snippets").exists()
    assert not (site / "screens").exists()


def _text(built: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", built.read_text()))


# Made from the code


def test_the_table_of_outcomes_has_the_rows_of_the_engine_in_their_order() -> None:
    rows = [line for line in page("consuming.md").splitlines() if line.startswith("|")]
    when = [line.split(" | ")[0].removeprefix("| ") for line in rows]
    start = when.index("what happened")
    assert when[start + 2 : start + 2 + len(TABLE)] == [row.when for row in TABLE.values()]
    for line, row in zip(rows[start + 2 :], TABLE.values(), strict=False):
        cells = line.split(" | ")
        copied_to = {"none": "–", "own queue": "the queue itself"}.get(row.copy, f"`{{queue}}{row.copy}`")
        assert cells[1:4] == [copied_to, row.attempt, row.original]
        assert f"`{row.counted}`" in cells[4]


def test_the_table_of_errors_has_each_below_its_parent() -> None:
    found = re.findall(r"^\| ((?:·\u2002)*)`(\w+)` \|", page("errors.md"), re.MULTILINE)
    assert sorted(name for _, name in found) == sorted(errors.__all__)
    parents: list[str] = []
    for dots, name in found:
        depth = dots.count("·")
        del parents[depth:]
        assert getattr(errors, name).__bases__[0].__name__ == (parents[-1] if parents else "Exception")
        parents.append(name)


def test_the_facts_of_errors_are_attributes() -> None:
    for name, facts in re.findall(r"^\| (?:·\u2002)*`(\w+)` \|.*\| (.*) \|$", page("errors.md"), re.MULTILINE):
        source = "".join(
            inspect.getsource(kind) for kind in getattr(errors, name).__mro__ if kind.__module__ == errors.__name__
        )
        for fact in re.findall(r"`(\w+)`", facts):
            assert re.search(rf"\bself\.{fact}\b|^    {fact} =", source, re.MULTILINE), f"{name} has no {fact}"


@pytest.mark.parametrize("name", acemq.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    said = hooks.described(name)
    assert said, f"acemq.{name} has no docstring of its own"
    assert f"| `{name}` | {said.replace('|', chr(92) + '|')} |" in page("reference.md")


@pytest.mark.parametrize(
    "group", [acemq.ConnectOptions, acemq.PublishOptions, acemq.ConsumeOptions, acemq.QueueOptions]
)
def test_every_option_says_what_it_is(group: Any) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `.+` \| (.*) \|$", hooks.options_of(group), re.MULTILINE)
    assert [name for name, _ in rows] == list(group.__annotations__)
    assert [name for name, said in rows if not said] == []


def test_every_diagnostic_is_explained_with_its_level() -> None:
    shown = page("watching.md")
    assert {telemetry.DEAD_LETTERED, telemetry.REPLAY_STOPPED} <= set(hooks.diagnostic_names())
    for name in hooks.diagnostic_names():
        assert f"| `{name}` |" in shown


# Only what is run, and only commands that exist


@pytest.mark.parametrize("path", PAGES, ids=called)
def test_a_page_shows_no_program_that_nobody_runs(path: Path) -> None:
    for language, text in blocks(path):
        assert language in ("python", "text", "sh")
        if language != "sh":
            assert INCLUDE.fullmatch(text), f"{called(path)} has a block that is no file:\n{text}"


def test_every_snippet_is_shown() -> None:
    shown = {name for path in PAGES for name in INCLUDE.findall(path.read_text())}
    assert {path.name for path in SNIPPETS.glob("*.py")} <= shown


def test_the_readme_shows_a_file() -> None:
    programs = [text for language, text in blocks(README) if language == "python"]
    assert programs == [(SNIPPETS / "first.py").read_text()]


def test_the_first_program_has_ten_lines() -> None:
    assert len([line for line in (SNIPPETS / "first.py").read_text().splitlines() if line.strip()]) == 10


def test_every_command_exists() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (README, *PAGES):
        for language, text in blocks(path):
            for line in text.splitlines() if language == "sh" else ():
                words = re.sub(r"^(\w+=\S+ )*", "", line.partition(" #")[0]).split()
                match words:
                    case ["make", target]:
                        assert target in targets, line
                    case ["pip", "install", what]:
                        assert set(re.findall(r"\w+", what)) <= extras.keys(), line
                    case ["acemq", *given]:
                        assert given[0] in _known(given), line
                        assert {word for word in given if word.startswith("-")} <= _known(given), line
                    case ["python", program]:
                        assert (ROOT / program).exists(), line
                    case ["python", "-m", module]:
                        assert (ROOT / module.replace(".", "/") / "__main__.py").exists(), line
                    case _:
                        pytest.fail(f"{called(path)}: {line!r} is of a kind that this test does not know")


def _known(given: list[str]) -> set[str]:
    """The words of the command that these begin with, and its options."""
    (found,) = [
        (words.split()[1:], command)
        for words, command in hooks.command_tree()
        if given[: len(words.split()) - 1] == words.split()[1:]
    ]
    return {*found[0], *(option for parameter in found[1].params for option in parameter.opts)}


def test_every_command_is_described_with_an_example_and_its_codes() -> None:
    shown = page("command-line.md")
    for words, _ in hooks.command_tree():
        assert re.search(rf"^### {words}$", shown, re.MULTILINE)
    assert all(f"| {code.value} | " in shown for code in ExitCode)


def test_every_screen_is_shown() -> None:
    shown = {name for path in PAGES for name in INCLUDE.findall(path.read_text())}
    assert {path.name for path in (DOCS / "screens").glob("*.txt")} <= shown


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = LINK.findall(README.read_text())
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        assert (ROOT / file).is_file(), link
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.MULTILINE)
        assert not anchor or anchor in [re.sub(r"[^\w]+", "-", heading.lower()) for heading in headings], link


@pytest.mark.parametrize("path", sorted((DOCS / "patterns").glob("*.md")), ids=called)
def test_the_pages_of_patterns_have_one_form(path: Path) -> None:
    assert re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE) == [
        "The problem",
        "The smallest program",
        "Promised",
        "Not promised",
        "When it fails",
        "What an operator sees",
        "Per transport",
    ]
