"""Writes the page of the frameworks that `loom analyze` reads: ``python -m tests.support.frameworks_page``."""

from __future__ import annotations

from collections.abc import Iterator

from loom.rl.diagnosis.frameworks import ENGINE_SOURCES, FRAMEWORKS, Framework, PublicSource, Quantity
from loom.rl.diagnosis.signals import ADDED, OF_ENGINES, Signal
from loom.rl.tuning.foreign_changes import START_OPTIONS
from tests.support.paths import ROOT

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "reference" / "rl-frameworks.md"

HEAD = """\
# Logs of other RL frameworks

[`loom analyze`](../guide/analyze.md) reads the logs of these frameworks. The tables are those of
`loom/loom/rl/diagnosis/frameworks.py`: the metric of the analysis, and the names that have it. The first name that
a row has counts; times of `train_ms`, `rpc_ms`, `write_ms` and `evaluate_ms` add up. A `*` stands for an
environment, an agent or a class. What [`loom tune`](../guide/tune.md) proposes of their options is in
`loom/loom/rl/tuning/foreign_changes.py`.

This page is written by `python -m tests.support.frameworks_page`.
"""


def page() -> str:
    """The page, as it has to be."""
    return "\n".join([HEAD, *_matrix(), *(line for one in FRAMEWORKS for line in _framework(one)), *_engines()])


def _matrix() -> Iterator[str]:
    yield "## What is read"
    yield ""
    yield f"| metric | {' | '.join(one.name for one in FRAMEWORKS)} |"
    yield f"| --- |{' --- |' * len(FRAMEWORKS)}"
    for signal in Signal:
        cells = ["yes" if any(each.signal is signal for each in one.quantities) else "" for one in FRAMEWORKS]
        if signal in OF_ENGINES:
            cells = [cell or "engine" for cell in cells]
        yield f"| `{signal.value}` | {' | '.join(cells)} |"
    yield ""
    yield "`engine` is read from the lines of vLLM or SGLang, if their log is there."
    yield ""


def _framework(one: Framework) -> Iterator[str]:
    yield f"## {one.name}"
    yield ""
    yield f"Recognized by two of: {', '.join(f'`{text.strip()}`' for text in one.telling)}."
    yield ""
    yield "| metric | names |"
    yield "| --- | --- |"
    for signal in Signal:
        parts = [_names(each) for each in one.quantities if each.signal is signal]
        if parts:
            yield f"| `{signal.value}` | {(' + ' if signal in ADDED else ', ').join(parts)} |"
    yield ""
    if one.waits:
        said = ", ".join(f"“{wait.text}” (the {wait.waits.value})" for wait in one.waits)
        yield f"Lines by which a side says that it waits: {said}."
        yield ""
    yield "Sources: " + ", ".join(map(_link, one.sources)) + "."
    yield ""
    yield f"Changes while it runs: {one.door or 'none'}."
    yield ""
    options = START_OPTIONS.get(one.name)
    if options is not None:
        answers = "; ".join(f"`{rule.value}`: {answer}" for rule, answer in options.answers.items())
        yield f"At the next start: {answers}. Sources: {', '.join(map(_link, options.sources))}."
        yield ""


def _names(quantity: Quantity) -> str:
    names = " or ".join(f"`{name}`" for name in quantity.names)
    beside = f" beside `{quantity.beside}`" if quantity.beside else ""
    over = f" over `{quantity.over}`" if quantity.over else ""
    return names + over + beside + (", as a version" if quantity.behind_step else "")


def _engines() -> Iterator[str]:
    yield "## vLLM and SGLang"
    yield ""
    yield "An engine's line has requests, waiting requests, preemptions, tokens a second and the use of its cache."
    yield ""
    yield "Sources: " + ", ".join(map(_link, ENGINE_SOURCES)) + "."
    yield ""


def _link(source: PublicSource) -> str:
    where = f"https://github.com/{source.repository}/blob/{source.commit}/{source.path}"
    return f"[{source.repository}/{source.path.rsplit('/', 1)[-1]}]({where})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
