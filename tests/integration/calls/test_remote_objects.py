"""`loom.cls` and `loom.fn`: ordinary classes and functions in the cluster, called like local ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.remote_objects import MOST_GENERATORS
from loom_proxy.local import LocalCluster
from tests.support.ordinary_classes import AsyncShop, OutOfStock, Shop, Takes, later, power


@pytest.fixture(scope="module")
def shop(shared: loom.Job) -> Iterator[Any]:
    """One object, for tests to which its state does not matter."""
    with loom.cls(Shop).to(shared, init_args=(1000,)) as remote:
        yield remote


@pytest.fixture(scope="module")
def async_shop(shared: loom.Job) -> Iterator[Any]:
    with loom.cls(AsyncShop).to(shared, init_args={"stock": 5}) as remote:
        yield remote


def test_methods_are_called_like_local_ones_and_state_persists(shared: loom.Job) -> None:
    with loom.cls(Shop).to(shared, init_args=(10,)) as shop:
        assert shop.buy(5) == 15
        assert shop.sell(3, price=2.0) == 6.0
        assert shop.buy(amount=0) == 12
        assert shop.double(4) == 8
        assert shop.called() == "Shop"


def test_several_objects_give_a_value_mesh_of_what_each_returned(shared: loom.Job) -> None:
    with loom.cls(Shop).to(shared, hosts=slice(None), per_host={"gpus": 2}, init_kwargs={"stock": 1}) as shops:
        pids = shops.pid()

        assert pids.sizes == {"hosts": 2, "gpus": 2}
        assert len(set(pids.values())) == 4
        assert shops.buy(1).values() == [2, 2, 2, 2]


def test_async_methods_and_others_work_in_one_class(async_shop: Any) -> None:
    assert async_shop.order(1) == 6
    assert async_shop.buy(1) == 7
    assert async_shop.order(0) == 7
    with pytest.raises(OutOfStock, match="closed"):
        async_shop.refuse()


async def test_async_gives_an_awaitable_of_any_method(shop: Any, async_shop: Any) -> None:
    stock = await shop.buy(0, async_=True)
    both = await asyncio.gather(shop.buy(1, async_=True), shop.buy(1, async_=True))

    assert both == [stock + 1, stock + 2]
    assert await async_shop.order(0, async_=True) == async_shop.buy(0)
    with pytest.raises(ZeroDivisionError):
        await shop.divide(0, async_=True)


def test_a_function_is_called_with_its_arguments(shared: loom.Job) -> None:
    with loom.fn(power).to(shared) as remote, loom.fn(later).to(shared) as remote_later:
        assert remote(3) == 9
        assert remote(2, exponent=10) == 1024
        assert remote_later(1) == 2
        with pytest.raises(loom.WrongArguments, match="power"):
            remote()


def test_a_generator_stays_in_the_cluster_and_gives_its_items_one_by_one(shop: Any, async_shop: Any) -> None:
    counted = shop.count(3)

    assert list(counted) == [0, 1, 2]
    assert list(counted) == []
    assert list(shop.hidden_generator())[:2] == [0, 1]
    assert list(async_shop.count(2)) == list(async_shop.count_slowly(2)) == [0, 1]
    with pytest.raises(StopIteration) as end:
        next(shop.count(0))
    assert end.value.value == "all"


async def test_a_generator_can_be_looped_over_on_a_loop(shop: Any, async_shop: Any) -> None:
    assert [number async for number in await shop.count(3, async_=True)] == [0, 1, 2]
    assert [number async for number in async_shop.count_slowly(3)] == [0, 1, 2]


def test_what_a_generator_raises_comes_after_its_items_as_its_own_class(shop: Any) -> None:
    counted = shop.count(2, then=OutOfStock("none left"))

    assert [next(counted), next(counted)] == [0, 1]
    with pytest.raises(OutOfStock, match="none left") as caught:
        next(counted)
    assert "in count" in str(caught.value.__cause__)
    assert list(counted) == []


def test_an_item_whose_wait_was_given_up_is_not_lost(shop: Any, tmp_path: Path) -> None:
    waiting = shop.count_after(str(tmp_path / "begin"), 2, timeout=0.2)
    with pytest.raises(loom.WaitTimeout):
        next(waiting)
    (tmp_path / "begin").touch()

    items = []
    while len(items) < 2:
        with contextlib.suppress(loom.WaitTimeout):  # on a busy machine
            items.append(next(waiting))
    assert items == [0, 1]


@pytest.mark.parametrize("leave", [lambda counted: counted.close(), lambda counted: None], ids=["closed", "left"])
@pytest.mark.parametrize("cls", [Shop, AsyncShop])
def test_a_generator_that_is_not_used_any_more_is_closed_in_the_cluster(
    shared: loom.Job, cls: Any, leave: Any
) -> None:
    with loom.cls(cls).to(shared) as shop:
        counted = shop.count(3)
        next(counted)
        assert shop.closed() == 0
        leave(counted)
        del counted
        shop.closed()  # sends what was noted
        assert shop.closed() == 1


def test_an_object_holds_the_newest_generators_only(shared: loom.Job) -> None:
    with loom.cls(Shop).to(shared) as shop:
        first, second = shop.count(3), shop.count(3)
        next(first)
        others = [shop.count(3) for _ in range(MOST_GENERATORS - 1)]

        with pytest.raises(loom.NotFound, match="holds 256"):
            next(second)
        assert next(first) == 1
        assert next(others[-1]) == 0


def test_many_objects_give_no_generators(shared: loom.Job) -> None:
    with loom.cls(Shop).to(shared, hosts=slice(None), init_args=(2,)) as shops:
        with pytest.raises(loom.WrongArguments, match=r"yields, and .* call one object"):
            shops.count(1)
        with pytest.raises(loom.WrongArguments, match="many objects: call one object"):
            shops.hidden_generator()


def test_a_generator_is_looped_over_in_the_cluster_as_well(shared: loom.Job, shop: Any) -> None:
    assert shared.run(lambda other: list(other.count(3)), shop) == [0, 1, 2]


def test_what_a_method_raised_comes_back_as_its_own_class(shop: Any) -> None:
    with pytest.raises(OutOfStock, match="5000 wanted") as caught:
        shop.sell(5000)

    assert isinstance(caught.value.__cause__, loom.ActorError)
    assert "in sell" in str(caught.value.__cause__)


def test_what_cannot_be_rebuilt_here_comes_as_an_actor_error(shop: Any) -> None:
    with pytest.raises(loom.ActorError) as caught:
        shop.fail_strangely(os.getpid())

    assert isinstance(caught.value.exception, loom.RemoteException)


def test_a_dead_process_is_told(shared: loom.Job) -> None:
    shop = loom.cls(Shop).to(shared)

    with pytest.raises(loom.SupervisionError):
        shop.die()
    with pytest.raises(loom.SupervisionError):
        shop.buy(1)
    shop.teardown()


def test_a_constructor_that_raises_does_so_where_the_object_is_made(shared: loom.Job) -> None:
    with pytest.raises(ValueError, match="a stock of -1"):
        loom.cls(Shop).to(shared, name="bad", init_args=(-1,))

    with loom.cls(Shop).to(shared, name="bad", init_args=(1,)) as shop:  # its name is free
        assert shop.buy(0) == 1


async def test_a_wait_can_be_bounded(shared: loom.Job) -> None:
    with loom.cls(Shop).to(shared) as shop:
        with pytest.raises(loom.WaitTimeout):
            shop.block(timeout=0.2)
        with pytest.raises(loom.WaitTimeout):
            await shop.block(async_=True, timeout=0.2)


def test_a_parameter_of_the_methods_own_is_the_methods(shop: Any) -> None:
    assert shop.wait(timeout=0.0) == 0.0


def test_a_remote_object_can_be_called_by_another(shared: loom.Job, shop: Any) -> None:
    before = shop.buy(0)
    with loom.cls(Shop).to(shared, name="visitor") as visitor:
        assert visitor.visit(shop) == before + 100
        assert shared.run(lambda other: other.buy(0), shop) == before + 100


def test_elsewhere_it_cannot_be_pickled(shop: Any) -> None:
    with pytest.raises(loom.UnpicklableError, match="means something only in its own session"):
        pickle.dumps(shop)


def test_it_is_gone_when_torn_down(shared: loom.Job) -> None:
    shop = loom.cls(Shop).to(shared, name="closing")
    assert "closing" in shared.meshes

    shop.teardown()
    shop.teardown()

    assert "closing" not in shared.meshes
    with pytest.raises(loom.MeshStopped, match="torn down"):
        shop.buy(1)


def test_teardown_after_the_job_does_nothing(job: loom.Job) -> None:
    shop = loom.cls(Shop).to(job)
    job.close()

    with pytest.raises(loom.SessionClosed):
        shop.buy(1)
    shop.teardown()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda shop: shop.bye(1), loom.NoSuchMethod, "did you mean 'buy'.* Its methods: block, buy, "),
        (lambda shop: shop.stock, loom.NoSuchMethod, "no method 'stock'"),
        (lambda shop: shop.size, loom.NoSuchMethod, "is no method, and attributes cannot be read"),
        (lambda shop: shop.opening, loom.NoSuchMethod, "is no method, and attributes cannot be read"),
        (lambda shop: shop._secret(), loom.NoSuchMethod, "private"),
        (lambda shop: shop.buy(), loom.WrongArguments, r"Shop.buy\(amount\)"),
        (lambda shop: shop.buy(1, cost=2), loom.WrongArguments, "cost"),
        (lambda shop: shop.buy(1, timeout=-1), ValueError, "non-negative"),
        (lambda shop: shop.echo(threading.Lock()), loom.UnpicklableError, "lock"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused(shop: Any, call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(shop)


@pytest.mark.parametrize(
    ("put", "error", "text"),
    [
        (lambda job: loom.cls(power), loom.WrongArguments, "takes a class"),
        (lambda job: loom.fn(Shop), loom.WrongArguments, "takes a function"),
        (lambda job: loom.cls(loom.Actor), loom.WrongArguments, "is an actor"),
        (lambda job: loom.cls("Shop").to(job), loom.WrongArguments, "is a name"),
        (lambda job: loom.fn("power").to(job), loom.WrongArguments, "is a name"),
        (lambda job: loom.cls(Shop).to(7), loom.WrongArguments, "takes a job"),
        (lambda job: loom.cls(Shop).to(job, init_args=(1, 2)), loom.WrongArguments, "too many"),
        (lambda job: loom.cls(Shop).to(job, init_args="ab"), loom.WrongArguments, "tuple or a list"),
        (lambda job: loom.cls(Takes).to(job), loom.EndpointNameTaken, "Takes.teardown"),
        (lambda job: loom.cls(Shop).to(job, hosts=7), loom.SliceOutOfRange, "hosts=7"),
        (lambda job: loom.cls(Shop).to(job, connection_mode="pigeon"), loom.WrongConnectionMode, "'pigeon'"),
        (lambda job: loom.cls(Shop).to(job, connection_mode="http"), loom.WrongConnectionMode, "transport='http'"),
    ],
)
def test_what_cannot_be_put_there_is_refused(shared: loom.Job, put: Any, error: type[Exception], text: str) -> None:
    before = set(shared.meshes)

    with pytest.raises(error, match=text):
        put(shared)

    assert set(shared.meshes) == before


def test_a_name_is_taken_once(shared: loom.Job) -> None:
    with loom.cls(Shop, name="corner").to(shared):
        with pytest.raises(loom.ObjectNameTaken, match="'corner'"):
            loom.cls(Shop).to(shared, name="corner")


def test_without_a_name_a_number_tells_objects_apart(shared: loom.Job, shop: Any) -> None:
    with loom.cls(Shop).to(shared) as other:
        assert (shop.name, other.name) == ("Shop", "Shop_2")


def test_a_closed_job_is_refused(job: loom.Job) -> None:
    job.close()

    with pytest.raises(loom.SessionClosed):
        loom.cls(Shop).to(job)


def test_the_mode_is_that_of_the_jobs_connection(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        with pytest.raises(loom.WrongConnectionMode, match="transport='websocket'"):
            loom.cls(Shop).to(job, connection_mode="websocket")
        with loom.cls(Shop).to(job, connection_mode="http") as shop:
            assert shop.buy(2) == 2


def test_its_methods_are_listed(shop: Any) -> None:
    assert {"buy", "sell", "teardown"} <= set(dir(shop))
    assert "_secret" not in dir(shop)
