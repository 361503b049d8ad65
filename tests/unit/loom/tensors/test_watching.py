"""Watched weights and gradients are summarized in the worker, and nothing waits for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import loom
from loom.errors import SupervisionError, WrongArguments
from loom.tensors import Shard
from loom.tensors.tensors import Tensors
from loom.tensors.watched import (
    MOST_HISTOGRAMS,
    MOST_NAMES,
    MOST_SUMMARIES,
    Distribution,
    Wanted,
    coarser,
)
from loom.tensors.watching import PLOTTED
from loom.tensors.worker import summaries
from loom.tensors.worker.summaries import Watched
from tests.support.near_tensors import NearWorker, NearWorkers, near_tensors
from tests.support.torch_agreement import of_the_cpu


@pytest.fixture
def own() -> Tensors:
    """Lazy tensors whose commands the test counts."""
    return near_tensors()


def commands_of(lt: Tensors, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the function of each command is added that is queued from now on."""
    put, seen = lt._put, []

    def counted(form: Any, *args: Any) -> int:
        seen.append(form.form.function)
        return put(form, *args)

    monkeypatch.setattr(lt, "_put", counted)
    return seen


def learn(weight: Any, times: int = 1) -> None:
    """Give a weight gradients that are the double of it."""
    for _ in range(times):
        weight.grad = None
        (weight * weight).sum().backward()


def agrees(found: Distribution, expected: torch.Tensor) -> None:
    values = expected.double()
    assert found.norm == pytest.approx(values.norm().item())
    assert found.mean == pytest.approx(values.mean().item())
    assert found.std == pytest.approx(values.std().item())
    assert (found.min, found.max) == (values.min().item(), values.max().item())
    assert found.nonfinite == 0
    assert found.histogram is not None
    assert list(found.histogram) == torch.histc(expected.float(), len(found.histogram)).int().tolist()


# What is summarized


def test_a_weight_and_its_gradient_are_summarized(own: Tensors) -> None:
    values = torch.randn(30, 7, generator=torch.Generator().manual_seed(1))
    w = own.tensor(values, requires_grad=True)
    watch = own.watch(w, "w", bins=10)
    learn(w)
    (only,) = watch.history
    assert only.step == 1
    agrees(only.weight, values)
    agrees(only.grad, 2 * values)


def test_the_gradient_is_what_was_gathered_so_far(own: Tensors) -> None:
    w = own.tensor([1.0, 2.0], requires_grad=True)
    watch = own.watch(w, "w")
    for _ in range(3):
        (w * 3.0).sum().backward()
    assert [(each.step, each.grad.max) for each in watch] == [(1, 3.0), (2, 6.0), (3, 9.0)]
    newest = watch.newest
    assert newest is not None
    assert newest.step == 3


def test_what_is_not_finite_has_a_share_and_spoils_no_number(own: Tensors) -> None:
    w = own.tensor([1.0, -2.0, math.inf, math.nan, 3.0, 2.0, -math.inf, math.nan], requires_grad=True)
    watch = own.watch(w, "w", bins=5)
    (w * 1.0).sum().backward()
    weight = watch.history[0].weight
    assert weight.nonfinite == 0.5
    assert (weight.min, weight.max, weight.mean) == (-2.0, 3.0, 1.0)
    assert list(weight.histogram or ()) == [1, 0, 0, 1, 2]


def test_of_nothing_finite_there_is_no_number(own: Tensors) -> None:
    w = own.tensor([math.nan, math.inf], requires_grad=True)
    watch = own.watch(w, "w", bins=4)
    (w * 1.0).sum().backward()
    weight = watch.history[0].weight
    assert weight.nonfinite == 1
    assert all(map(math.isnan, weight[:5]))
    assert list(weight.histogram or ()) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("values", "dtype", "histogram"),
    [
        ([2.0, 2.0, 2.0], "float32", [3, 0]),
        ([0.1], "float32", [1, 0]),
        ([], "float32", [0, 0]),
        ([-3e38, 3e38, 3e38], "float32", [1, 2]),
        ([1e-38, 3e-38], "float32", [1, 1]),
        ([-1e200, 1e308], "float64", [1, 1]),
        ([-6e4, 6e4, 1.0], "float16", [1, 2]),
        ([-1.0, 1.0, 0.5], "bfloat16", [1, 2]),
    ],
)
def test_unusual_values(own: Tensors, values: list[float], dtype: str, histogram: list[int]) -> None:
    w = own.tensor(values, dtype=dtype, requires_grad=True)
    watch = own.watch(w, "w", bins=2)
    (w * 1.0).sum().backward()
    weight = watch.history[0].weight
    assert list(weight.histogram or ()) == histogram
    assert weight.nonfinite == 0
    if len(set(values)) == 1:
        assert weight.std == 0


@pytest.mark.parametrize("spoilt", [0, 3, 1000])
def test_a_gpu_whose_answers_are_not_waited_for_computes_the_same(spoilt: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    values[:spoilt] = math.nan
    now, later = (
        summaries._of_pieces([look(each) for each in values.split(300)], 8, lambda value, how: value)
        for look in (summaries._finite, summaries._masked)
    )
    assert torch.allclose(now, later)


def test_complex_weights_are_summarized_by_their_absolute_values(own: Tensors) -> None:
    w = own.tensor([3 + 4j, 0j], requires_grad=True)
    watch = own.watch(w, "w", bins=2)
    (w * 2.0).backward(own.ones(2, dtype="complex64"))
    weight = watch.history[0].weight
    assert (weight.norm, weight.max, weight.mean) == (5.0, 5.0, 2.5)


@pytest.mark.parametrize("bins", [1, 7, 1024])
def test_histograms_have_as_many_bins_as_were_asked_for(own: Tensors, bins: int) -> None:
    w = own.randn(100, requires_grad=True)
    watch = own.watch(w, "w", bins=bins)
    learn(w)
    histogram = watch.history[0].weight.histogram
    assert histogram is not None
    assert (len(histogram), sum(histogram)) == (bins, 100)


def test_a_spread_weight_has_the_numbers_of_the_whole(own: Tensors) -> None:
    values = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    values[0, 0] = math.nan
    found = []
    with NearWorkers({"gpus": 2}) as workers:
        for lt, placements in ((own, None), (Tensors(workers), [Shard(0)])):
            w = lt.tensor(values, requires_grad=True, placements=placements)
            watch = lt.watch(w, "w", bins=6)
            learn(w)
            (only,) = watch.history
            found.append(only)
            assert w.tolist()[1] == values.tolist()[1]
    one, other = found
    for part in ("weight", "grad"):
        whole, spread = getattr(one, part), getattr(other, part)
        assert spread[:6] == pytest.approx(whole[:6])
        assert list(spread.histogram) == list(whole.histogram)


# What it costs


def test_gradients_queue_nothing_for_what_watches_them(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    w = own.ones(3, requires_grad=True)
    learn(w)
    without = commands_of(own, monkeypatch)
    learn(w, 5)
    watch = own.watch(w, "w", every=2)
    watched = commands_of(own, monkeypatch)
    learn(w, 5)
    assert watched == without[: len(watched)]
    assert [each.step for each in watch] == [2, 4]


def test_gradients_that_are_asked_for_do_not_count(own: Tensors) -> None:
    w = own.ones(3, requires_grad=True)
    watch = own.watch(w, "w")
    own.grad((w * w).sum(), w)
    assert watch.history == []
    assert watch.newest is None


def test_only_the_newest_summaries_are_kept_and_fewer_histograms() -> None:
    watched = Watched()
    grad = weight = torch.ones(2)
    for _ in range(MOST_SUMMARIES + 5):
        watched.take(grad, weight, "w", 2, 1)
    found, left_out = watched.newest(Wanted())
    history = found["w"]
    assert (history.gradients, len(history.summaries), left_out) == (MOST_SUMMARIES + 5, MOST_SUMMARIES, 0)
    assert history.summaries[0].step == 6
    with_histograms = [each.step for each in history.summaries if each.weight.histogram is not None]
    assert with_histograms == list(range(MOST_SUMMARIES + 6 - MOST_HISTOGRAMS, MOST_SUMMARIES + 6))


def test_only_who_wants_all_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            self.done = True

    events = [Event(), Event(), Event()]
    coming = iter(events)
    monkeypatch.setattr(summaries, "_on_host", lambda numbers: (numbers, next(coming)))
    watched = Watched()
    for _ in events:
        watched.take(torch.ones(1), torch.ones(1), "w", 2, 1)

    def steps(wait: bool) -> list[int]:
        return [each.step for each in watched.newest(Wanted(wait=wait))[0]["w"].summaries]

    assert steps(wait=False) == []
    events[0].done = True
    assert steps(wait=False) == [1]
    assert not events[2].done
    assert steps(wait=True) == [1, 2, 3]


def test_the_name_that_was_not_used_for_longest_goes() -> None:
    watched = Watched()
    for number in range(MOST_NAMES):
        watched.take(torch.ones(1), torch.ones(1), f"w{number}", 2, 2)
    watched.take(torch.ones(1), torch.ones(1), "w0", 2, 2)
    watched.take(torch.ones(1), torch.ones(1), "one more", 2, 2)
    found, _ = watched.newest(Wanted(most=0))
    assert len(found) == MOST_NAMES
    assert "w0" in found
    assert "w1" not in found


def test_few_summaries_lie_evenly_and_end_with_the_newest() -> None:
    watched = Watched()
    for _ in range(101):
        watched.take(torch.ones(1), torch.ones(1), "w", 2, 1)
    found, _ = watched.newest(Wanted(most=5, histograms=1))
    summaries = found["w"].summaries
    assert [each.step for each in summaries] == [1, 26, 51, 76, 101]
    assert [each.grad.histogram is None for each in summaries] == [True] * 4 + [False]


def test_names_over_the_limit_are_counted() -> None:
    watched = Watched()
    for name in "cab":
        watched.take(torch.ones(1), torch.ones(1), name, 2, 2)
    found, left_out = watched.newest(Wanted(limit=2))
    assert (list(found), left_out) == (["a", "b"], 1)


def test_a_finer_histogram_is_added_up() -> None:
    assert coarser([1, 2, 3, 4, 5], 2) == [6, 9]
    assert coarser([1, 2], 4) == [1, 2]
    assert coarser([], 4) == []


# Names


def test_a_name_goes_on_with_a_weight_that_is_made_anew(own: Tensors) -> None:
    w = own.tensor([4.0], requires_grad=True)
    for _ in range(3):
        watch = own.watch(w, "w")
        (w * w).sum().backward()
        w = w.sub(w.grad * 0.25).detach().requires_grad_()
    assert [(each.step, each.weight.max) for each in watch] == [(1, 4.0), (2, 2.0), (3, 1.0)]
    assert list(own.watched()) == ["w"]


def test_a_weight_that_changes_in_place_is_watched_once(own: Tensors) -> None:
    w = own.tensor([4.0], requires_grad=True)
    watch = own.watch(w, "w")
    optimizer = own.optim.SGD([w], lr=0.25)
    for _ in range(2):
        learn(w)
        optimizer.step()
    with own.no_grad():
        w -= 1.0
    learn(w)
    assert [each.weight.max for each in watch] == [4.0, 2.0, 0.0]


def test_each_parameter_of_a_module_that_learns_is_watched(own: Tensors) -> None:
    model = own.nn.Sequential(own.nn.Linear(3, 2), own.nn.ReLU(), own.nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    watches = own.watch(model, "net", bins=4)
    assert list(watches) == ["net.0.weight", "net.2.weight", "net.2.bias"]
    model(own.ones(5, 3)).sum().backward()
    history = watches.history
    assert {name: len(each) for name, each in history.items()} == dict.fromkeys(watches, 1)
    assert history["net.2.bias"][0].grad.norm == 5.0
    assert watches["net.2.bias"].name == "net.2.bias"
    watches.stop()
    model(own.ones(5, 3)).sum().backward()
    assert len(watches["net.2.bias"].history) == 1
    watches.clear()
    assert watches.history == {name: [] for name in watches}


def test_watching_ends_and_begins_again(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    w = own.ones(1, requires_grad=True)
    watch = own.watch(w, "w")
    learn(w)
    watch.stop()
    watch.stop()
    seen = commands_of(own, monkeypatch)
    learn(w)
    assert ".watch" not in seen
    again = own.watch(w, "w")
    learn(w)
    assert [each.step for each in again] == [1, 2]
    again.clear()
    learn(w)
    assert [each.step for each in again] == [1]


def test_a_tensor_has_one_name(own: Tensors) -> None:
    w = own.ones(1, requires_grad=True)
    own.watch(w, "one")
    own.watch(w, "other")
    learn(w)
    assert {name: len(each) for name, each in own.watched().history.items()} == {"other": 1}


def test_another_setting_holds_from_then_on(own: Tensors) -> None:
    w = own.ones(1, requires_grad=True)
    watch = own.watch(w, "w", bins=2)
    learn(w)
    assert own.watch(w, "w", bins=3) is watch
    learn(w)
    assert [len(each.weight.histogram or ()) for each in watch] == [2, 3]


def test_watching_keeps_no_weight_alive(own: Tensors) -> None:
    w = own.ones(1, requires_grad=True)
    watch = own.watch(w, "w")
    assert "float32[1]" in repr(watch)
    ident = w._value.id
    own.synchronize()
    del w
    own.synchronize()
    own.synchronize()
    assert ident not in own._dispatcher._workers.values.tensors
    assert "no tensor" in repr(watch)


def test_a_name_begins_anew_in_other_processes(tmp_path: Path) -> None:
    lt = Tensors(NearWorker(), lambda procs: NearWorker())
    w = lt.tensor([1.0, 2.0], requires_grad=True)
    watch = lt.watch(w, "w")
    learn(w, 2)
    lt.checkpoint(str(tmp_path))
    lt.restore()
    assert watch.history == []
    learn(w)
    assert [(each.step, each.weight.max) for each in watch] == [(1, 2.0)]


# Compiled functions


def compiled_step(lt: Tensors, w: Any) -> Any:
    @lt.compile
    def step(x: Any) -> Any:
        loss = (w * x).pow(2).sum()
        loss.backward()
        with lt.no_grad():
            w.sub_(w.grad * 0.1)
        w.grad = None
        return loss

    return step


def is_replayed(lt: Tensors, step: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as context:
        seen = commands_of(lt, context)
        step(lt.ones(2))
    return ".body" in seen


def test_a_compiled_function_summarizes_as_it_does_without(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    w = own.tensor([1.0, 2.0], requires_grad=True)
    watch = own.watch(w, "w", bins=2)
    step = compiled_step(own, w)
    for _ in range(7):
        step(own.ones(2))
    assert is_replayed(own, step, monkeypatch)
    found = watch.history
    assert [each.step for each in found] == list(range(1, 9))
    assert [each.weight.max for each in found] == pytest.approx([2.0 * 0.8**k for k in range(8)])
    assert [each.grad.max for each in found] == pytest.approx([4.0 * 0.8**k for k in range(8)])


def test_in_a_compiled_function_the_worker_counts(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    w = own.tensor([1.0, 2.0], requires_grad=True)
    watch = own.watch(w, "w", every=3)
    step = compiled_step(own, w)
    for _ in range(9):
        step(own.ones(2))
    assert is_replayed(own, step, monkeypatch)
    assert [each.step for each in watch] == [3, 6, 9]


def test_what_was_compiled_before_is_watched_from_then_on_and_no_more_after_it_ends(
    own: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = own.tensor([1.0, 2.0], requires_grad=True)
    step = compiled_step(own, w)
    for _ in range(4):
        step(own.ones(2))
    watch = own.watch(w, "w")
    for _ in range(4):
        step(own.ones(2))
    assert len(watch.history) == 4
    watch.stop()
    for _ in range(4):
        step(own.ones(2))
    assert len(watch.history) == 4
    assert is_replayed(own, step, monkeypatch)


# What goes wrong


def test_bad_input_is_refused(own: Tensors) -> None:
    w = own.ones(2, requires_grad=True)
    other = near_tensors()
    frozen = own.nn.Linear(1, 1).requires_grad_(False)
    for target, name, more, why in [
        (own.ones(2), "w", {}, "does not require a gradient"),
        (w * 2.0, "w", {}, "was computed, and keeps no gradient"),
        (other.ones(2, requires_grad=True), "w", {}, "another mesh"),
        (other.nn.Linear(1, 1), "w", {}, "another mesh"),
        (frozen, "w", {}, "no parameter of the Linear"),
        (3, "w", {}, "takes a tensor or a module, not int"),
        (w, "", {}, "1 to 200 printable characters"),
        (w, "x" * 201, {}, "1 to 200 printable characters"),
        (own.nn.Linear(1, 1), "x" * 195, {}, "1 to 200 printable characters"),
        (w, "a\nb", {}, "printable"),
        (w, 7, {}, "printable"),
        (w, "w", {"bins": 0}, "from 1 to 1024, not 0"),
        (w, "w", {"bins": 1025}, "from 1 to 1024, not 1025"),
        (w, "w", {"bins": 2.0}, "whole number"),
        (w, "w", {"bins": True}, "whole number"),
        (w, "w", {"every": 0}, "1 or more, not 0"),
        (w, "w", {"every": None}, "whole number"),
    ]:
        with pytest.raises(WrongArguments, match=why):
            own.watch(target, name, **more)
    learn(w)
    assert not own.watched()


@of_the_cpu
def test_a_gradient_that_failed_is_told_with_its_cause_and_the_next_one_counts(own: Tensors) -> None:
    w = own.tensor([1.0], requires_grad=True)
    watch = own.watch(w, "w")
    bad = own.ones(3)[own.tensor([9])]
    (w * bad).sum().backward()
    with pytest.raises(loom.OperationFailed, match=r"newest gradient of 'w' was not summarized: .*index"):
        watch.history
    assert w.tolist() == [1.0], "the weight is as good as before"
    w.grad = None
    learn(w)
    assert [each.step for each in watch] == [2]


def test_a_summary_that_fails_spoils_neither_the_gradient_nor_the_earlier_ones(
    own: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = own.ones(2, requires_grad=True)
    watch = own.watch(w, "w")
    learn(w)
    own.synchronize()
    with monkeypatch.context() as broken:
        broken.setattr(summaries, "_numbers", lambda *args: (_ for _ in ()).throw(MemoryError("no room")))
        learn(w)
        assert w.grad.tolist() == [2.0, 2.0]
    own.synchronize()
    with pytest.raises(
        loom.OperationFailed, match="newest gradient of 'w' was not summarized: MemoryError: no room"
    ):
        watch.history
    assert "no room" in watch._repr_html_()
    learn(w)
    assert [each.step for each in watch] == [1, 3]


# In a notebook


def test_a_notebook_shows_lines_and_bars(own: Tensors) -> None:
    w = own.tensor([1.0, math.nan], requires_grad=True)
    watch = own.watch(w, "<b>w")
    assert "No gradient was summarized yet" in watch._repr_html_()
    learn(w, 3)
    html = watch._repr_html_()
    assert "&lt;b&gt;w" in html
    assert "<b>w" not in html
    assert html.count("<svg") == 4
    assert "50.000% not finite" in html
    assert "script" not in html


def test_a_notebook_shows_some_tensors_of_a_module(own: Tensors) -> None:
    model = own.nn.Sequential(*(own.nn.Linear(2, 2) for _ in range(PLOTTED)))
    watches = own.watch(model, "net")
    model(own.ones(1, 2)).sum().backward()
    html = watches._repr_html_()
    assert html.count("<svg") == 4 * PLOTTED
    assert f"… and {PLOTTED} more" in html
    assert "net.0.weight" in repr(watches)


def test_a_notebook_says_why_there_is_nothing_to_show(own: Tensors) -> None:
    w = own.ones(1, requires_grad=True)
    watch = own.watch(w, "w")

    class Gone:
        def call_one(self, wanted: Any) -> Any:
            raise SupervisionError("the process is gone")

    own._dispatcher._workers.watched = Gone()
    assert "cannot be read: the process is gone" in watch._repr_html_()
    with pytest.raises(SupervisionError):
        watch.history
