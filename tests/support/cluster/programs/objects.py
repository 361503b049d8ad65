"""What a researcher does with `loom.cls` and a ``kubetorch.Compute``: ``python objects.py WHAT``.

It says what comes of it in lines of JSON, and goes on where it waits when it is given a line on standard input.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import secrets
import sys
import time

import kubetorch as kt
from shelf import Shelf, doubled

import loom
from loom import images as loom_images
from loom_proxy.kubernetes.service_lookup import kept_token

BOUND = 60.0


def say(event, **about):
    print(json.dumps({"event": event, **about}), flush=True)


def compute(replicas=1, **options):
    return kt.Compute(cpus="0.1", replicas=replicas, image=kt.Image(image_id="local"), launch_timeout=90, **options)


def error_of(call, *args, **kwargs):
    """The class and the text of what a call raises, and whether the remote traceback comes along."""
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - told to the test
        return [type(error).__name__, str(error), "in take" in str(error.__cause__)]
    return None


def held():
    """An object in pods of its own; its program stays, is cut off, and ends without tearing it down."""
    shelf = loom.cls(Shelf).to(compute(2), init_args={"start": 10}, connection_mode="websocket", stream_logs=False)
    say("made", name=shelf.name, value=shelf.put(1), where=shelf.where())
    shelf.talk("inaudible")
    say("calls", **{
        "error": error_of(shelf.take, 100),
        "refused": error_of(shelf.put),
        "unknown": error_of(lambda: shelf.steal),
        "generator": list(shelf.each()),
        "awaited": asyncio.run(several(shelf)),
        "on_loop": asyncio.run(looped(shelf)),
    })  # fmt: skip
    sys.stdin.readline()  # the link is cut
    answers = asyncio.run(pipelined(shelf))
    say("resumed", values=answers)
    sys.stdin.readline()  # another program has called it
    say("shared", value=shelf.put(0))


async def several(shelf):
    return await asyncio.gather(*(shelf.put(1, async_=True) for _ in range(3)))


async def looped(shelf):
    return [number async for number in await shelf.each(async_=True)]


async def pipelined(shelf):
    calls = [shelf.put(1, async_=True, timeout=BOUND) for _ in range(20)]
    say("asked")
    return await asyncio.gather(*calls)


def found():
    """Another program finds the object by its name, calls it, and is cut off as well."""
    shelf = loom.cls("Shelf")
    say("found", value=shelf.put(5), error=error_of(shelf.take, 1000), generator=list(shelf.each())[:2])
    sys.stdin.readline()  # the link is cut
    say("resumed", values=asyncio.run(pipelined(shelf)))


def existing():
    """A third takes the object that is there, with ``to_async``; and a fourth puts a new one in its place."""
    there = asyncio.run(loom.cls(Shelf).to_async(compute(2), init_args={"start": 0}, get_if_exists=True))
    say("existing", value=there.put(0), unknown=error_of(lambda: there.steal))
    anew = loom.cls(Shelf).to(compute(2), init_args={"start": 100}, stream_logs=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        anew.talk("audible")
        deadline = time.monotonic() + BOUND
        while "audible" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.1)
    say("printed", text=printed.getvalue())
    say("anew", value=anew.put(0), old=error_of(there.put, 0, timeout=BOUND))
    with loom.cls(name="shelf") as named:
        say("named", value=named.put(0))
    say("gone", error=error_of(lambda: loom.cls("shelf").put(1)))


def prefixed():
    """Services of other people's prefixes."""
    kt.config.username = "ada"
    ours = loom.fn(doubled).to(compute(), timeout=BOUND)
    say("made", name=ours.name, value=ours(4))
    kt.config.username = "bob"
    say("bobs", error=error_of(loom.fn("doubled"), 4))
    adas = loom.fn("doubled", reload_prefixes="ada")
    say("adas", value=adas(5))
    there = loom.fn(doubled).to(compute(), get_if_exists=True, reload_prefixes=["ada"])
    say("there", name=there.name, value=there(6))
    token = kept_token("default", ours.name)
    os.environ["XDG_STATE_HOME"] = os.path.abspath("elsewhere")  # another machine, which keeps no token
    say("no_token", error=error_of(loom.fn("doubled", reload_prefixes=["ada"]), 1))
    os.environ["LOOM_TOKEN"] = token
    say("token", value=loom.fn("doubled", reload_prefixes=["ada"])(7))
    adas.teardown()
    say("gone")


def failing():
    """What cannot be deployed, or made."""
    say("constructor", error=error_of(loom.cls(Shelf).to, compute(), init_args={"start": -1}, name="bad"))
    say("nothing", error=error_of(lambda: loom.cls("bad").put(1)))
    say("positional", error=error_of(loom.cls(Shelf).to, compute(), init_args=(1,), connection_mode="http"))
    say("mode", error=error_of(loom.cls(Shelf).to, compute(), connection_mode="pigeon"))


def http():
    """Kubetorch's own way."""
    with loom.cls(Shelf, "plain").to(compute(), init_args={"start": 10}, connection_mode="http") as shelf:
        say("made", kind=type(shelf).__name__, value=shelf.put(1), error=error_of(shelf.take, 100))
        say("found", kind=repr(loom.cls("plain").put), value=loom.cls("plain").put(1))
        again = loom.cls(Shelf, "plain").to(compute(), connection_mode="http", get_if_exists=True)
        say("again", value=again.put(0))
        function = loom.fn(doubled).to(compute(), connection_mode="http")
        say("function", value=function(21), named=loom.fn("doubled")(4))
        function.teardown()
    say("closed")


def http_again():
    """Kubetorch's server fails to load the class, once, by what is in the folder that it is given."""
    pods = compute(env_vars={"PYTHONPATH": sys.argv[2]})
    with loom.cls(Shelf, "unlucky").to(pods, init_args={"start": 10}, connection_mode="http") as shelf:
        say("made", value=shelf.put(1))
    say("closed")


def by_hand():
    """Pods that the user deploys with the public ``kubetorch.cls`` and `LoomPod`, and a job on them."""
    from loom_gateway.pod.loom_pod import LoomPod

    token = secrets.token_hex(16)
    settings = {
        "mesh": "workers",
        "meshes": [["workers", "mine-headless.default.svc.cluster.local", 2]],
        "token_sha256": hashlib.sha256(token.encode()).hexdigest(),
    }
    where = compute(2).distribute("local", workers=2)
    for _ in range(3):  # Kubetorch's server loads its class once in each deployment, and may fail on a busy machine
        pods = kt.cls(LoomPod, name="mine", sync_dir=False).to(where, init_args=settings)
        deadline = time.monotonic() + BOUND / 2
        while time.monotonic() < deadline:
            status = pods.status()
            listening = [pod["worker"]["listening"] for pod in status.get("pods", ())]
            if status.get("gateway") and listening == [True, True]:
                break
            time.sleep(0.5)
        else:
            continue
        break
    say("deployed", pods=len(status["pods"]))
    url = "kube://kubetorch/kubetorch-controller:8080/default/mine-headless:8470"
    with loom.connect(url, token) as job, loom.cls(Shelf).to(job, hosts=slice(None), init_args=(3,)) as shelves:
        say("called", values=list(shelves.put(1).values()), hosts=job.hosts.extent.nelements)
    pods.teardown()
    say("closed")


def elsewhere():
    """A job in another namespace, by the address of nginx, with a synced folder and an object of `loom.cls`."""
    pods = compute(namespace="research")
    with loom.KubernetesJob(
        pods, name="study", namespace="research", sync_dirs=[os.path.dirname(os.path.abspath(__file__))]
    ) as job:
        say("open", url=job.job.url, transport=job.transport, synced=[one.name for one in job.synced])
        with loom.cls(Shelf, "own").to(job, init_args={"start": 1}) as own:
            say("own", value=own.put(1), by_name=job.run(defined_in, own))
    shelf = loom.cls(Shelf, "shelf").to(compute(namespace="research"), init_args={"start": 4})
    say("made", value=shelf.put(1))
    say("here", error=error_of(lambda: loom.cls("shelf", namespace="default").put(1)))
    with loom.cls("shelf") as named:
        say("named", value=named.put(1))
    say("closed")


def images():
    """Images with a step that fails, with Loom's own line, and with Loom's line for a wheel that is not there."""
    wheel = sys.argv[2]
    local = kt.Image(image_id="local")
    broken = kt.Image(image_id="local").pip_install(["nothing-like-it==1.0"])
    say("broken", error=error_of(loom.cls(Shelf).to, compute_with(broken), name="broken"))
    good = loom_images._with_loom(local, ["msgpack"], wheel)
    with loom.cls(Shelf, "installed").to(compute_with(good), init_args={"start": 1}) as shelf:
        say("installed", value=shelf.put(1))
    say("closed")


def compute_with(image):
    return kt.Compute(cpus="0.1", image=image, launch_timeout=90)


def defined_in(own):
    """Whether this runs where the folder was synced: its module is imported there."""
    import shelf

    return [own.put(0), shelf.doubled(2), os.path.exists(shelf.__file__)]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
