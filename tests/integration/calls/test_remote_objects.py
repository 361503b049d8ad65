"""`loom.cls` and `loom.fn`: ordinary classes and functions in the cluster, called like local ones."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import loom
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
        (lambda shop: shop.items(), loom.WrongArguments, "yields"),
        (lambda shop: shop.hidden_generator(), TypeError, "return a list"),
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
