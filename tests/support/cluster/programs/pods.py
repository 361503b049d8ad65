"""What a researcher does with the pods of a job: ``python pods.py WHAT``. Says what came of it in lines of JSON."""

import contextlib
import json
import logging
import os
import sys
import threading
import time

import kubetorch as kt

import loom

BOUND = 120.0
TWICE_AGAIN = 300.0  # seconds for two deployments of a pod without its class: a busy machine may need both
IMAGE = kt.Image(image_id="local")
CLIENTS = 4
"""Clients of one session at once."""


def say(event, **about):
    print(json.dumps({"event": event, **about}), flush=True)


def a_job(replicas=2, env_vars=None, **options):
    compute = kt.Compute(cpus=1, replicas=replicas, image=IMAGE, env_vars=env_vars)
    return loom.KubernetesJob(compute=compute, **options)


def status(job):
    """What the pods say of themselves, over Kubetorch's HTTP."""
    return job._meshes[0].remote.status(stream_logs=False)


def again():
    """A job is applied again, by other programs as it were; the workers and the session stay."""
    with a_job() as job:
        before = status(job)
        with a_job() as second:
            after = status(second)
            pids = [[pod["worker"]["pid"] for pod in found["pods"]] for found in (before, after)]
            say("again", same=pids[0] == pids[1])
            say("gateways", before=before["gateway"], after=after["gateway"])
        with a_job(session_linger=1800.0) as third:
            after = status(third)
            say("changed", same=pids[0] == [pod["worker"]["pid"] for pod in after["pods"]])
        job.hosts.spawn_procs().initialized.get(BOUND)
        say("still")
    say("closed")


class Counter(loom.Actor):
    def __init__(self):
        self.n = 0

    @loom.endpoint
    def add(self, k):
        self.n += k
        return self.n


def detached():
    """A program leaves its job running, and another goes on with it and removes it."""
    with a_job() as job:
        counters = job.hosts.slice(hosts=0).spawn_procs().spawn("counters", Counter)
        counters.add.call_one(1).get(BOUND)
        session = job.session
        job.detach()
    say("detached")
    sys.stdin.readline()
    later = a_job(session=session).apply()
    say("again", value=later.meshes["counters"].add.call_one(1).get(BOUND))
    later.kill()
    say("closed")


class Trained(Counter):
    """Counts, and reports to the weaver as a training process does."""

    @loom.endpoint
    def train(self, name):
        from loom.threadlet import Threadlet

        self.threadlet = Threadlet(name)
        with self.threadlet.step(0):
            pass

    @loom.endpoint
    def where(self):
        return os.environ["POD_IP"]


class Calls:
    """Calls of one session's counter, on its own pod, by several clients with connections of their own."""

    def __init__(self, job, pod, host, name):
        self.job, self.name = job, name
        counter = job.hosts.slice(hosts=host).spawn_procs().spawn(name, Trained)
        assert counter.where.call_one().get(BOUND) == pod
        counter.train.call_one(name).get(BOUND)
        self.answers, self.errors, self.disconnected = [], [], 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(CLIENTS)]

    def begin(self):
        for thread in self._threads:
            thread.start()

    def _call(self):
        try:
            with loom.connect(self.job.url, self.job.token, self.job.session, mode="call") as client:
                counter = client.meshes[self.name]
                while not self._over.wait(0.02):
                    self.answers.append(counter.add.call_one(1).get(BOUND))
                self.disconnected += sum(event.name == "disconnected" for event in client.events(timeout=0))
        except Exception as error:  # noqa: BLE001 - it is told
            self.errors.append(repr(error))

    def end(self):
        self._over.set()
        for thread in self._threads:
            thread.join(BOUND)


def until(what, is_true):
    deadline = time.monotonic() + BOUND
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def pod_lost():
    """Three sessions on three pods. One pod, which has the weaver too, is killed while they are called."""
    job = a_job(replicas=3).apply()
    jobs = [job, *(loom.connect(job.url, job.token) for _ in range(2))]
    found = status(job)
    hosts = [pod["address"] for pod in found["pods"]]
    lost = found["weaver"]
    pods = [one.run(lambda: os.environ["POD_IP"]) for one in jobs]
    say("sessions", pods=pods)
    living = [
        Calls(one, pod, hosts.index(pod), f"calls_{number}")
        for number, (one, pod) in enumerate(zip(jobs, pods, strict=True))
        if pod != lost
    ]
    (gone,) = (one for one, pod in zip(jobs, pods, strict=True) if pod == lost)
    for calls in living:
        calls.begin()

    def have_gone_on(answers):
        assert not [error for calls in living for error in calls.errors], [calls.errors for calls in living]
        return all(len(calls.answers) > more + 20 for calls, more in zip(living, answers, strict=True))

    until("all are called", lambda: have_gone_on([0, 0]))
    until("all replicas report", lambda: len(replicas_of(living[0].job)) == len(living))
    say("weaver", address=lost)
    sys.stdin.readline()  # it is killed
    try:
        gone.run(lambda: None)
        say("gone", error=None)
    except loom.LoomError as error:
        say("gone", error=type(error).__name__, text=str(error))
    until("another pod has the weaver", lambda: weaver_of(job) not in (None, lost))
    until("the replicas have come to it", lambda: replicas_of(living[0].job) == {calls.name for calls in living})
    before = [len(calls.answers) for calls in living]
    until("the calls go on", lambda: have_gone_on(before))
    for calls in living:
        calls.end()
    say(
        "called",
        errors=[error for calls in living for error in calls.errors],
        right=[sorted(calls.answers) == list(range(1, len(calls.answers) + 1)) for calls in living],
        disconnected=sum(calls.disconnected for calls in living),
    )
    until("the pod is back", lambda: len(status(job)["pods"]) == 3)
    with a_job(replicas=3) as new:
        say("new", hosts=new.hosts.extent.nelements, weaver=weaver_of(job))
        new.hosts.spawn_procs().initialized.get(BOUND)
    job.kill()
    say("closed")


def replicas_of(job):
    with contextlib.suppress(loom.LoomError):  # the weaver is away
        return set(job.weaver.replicas())
    return set()


def weaver_of(job):
    with contextlib.suppress(Exception):  # Kubetorch's own, when it asks the pod that is gone
        return status(job)["weaver"]
    return None


def restarted():
    """A pod's worker is restarted over HTTP; the session uses it again."""
    with a_job() as job:
        _, second = status(job)["pods"]
        remote = job._meshes[0].remote
        new = remote.restart_worker(second["name"], stream_logs=False)
        say("restarted", other=new["worker"]["pid"] != second["worker"]["pid"], name=new["name"] == second["name"])
        for event in job.events(timeout=BOUND):
            if event.name == "host_lost":
                break
        deadline = time.monotonic() + BOUND
        while job.refresh_hosts() != [1]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        job.hosts.spawn_procs().initialized.get(BOUND)
        say("usable")
        try:
            remote.restart_worker("nobody", stream_logs=False)
        except Exception as error:  # noqa: BLE001 - Kubetorch's own, of the name that it had in the pod
            say("unknown", text=str(error))
    say("closed")


def one_without_its_class():
    """Kubetorch's server fails to load the class in one pod, once, by what is in the folder that it is given."""
    with warnings_said(), a_job(name="unlucky", env_vars={"PYTHONPATH": sys.argv[2]}) as job:
        found = status(job)
        say("open", pods=len(found["pods"]), starts=[pod["worker"]["starts"] for pod in found["pods"]])
        job.hosts.spawn_procs().initialized.get(BOUND)
    say("closed")


def one_back_without_its_class():
    """The same, with a pod that is lost and replaced while the job is open."""
    with warnings_said(), a_job(name="unlucky", env_vars={"PYTHONPATH": sys.argv[2]}) as job:
        found = status(job)
        here = job.run(lambda: os.environ["POD_IP"])
        others = [pod for pod in found["pods"] if pod["address"] != here]
        say("open", others=[pod["name"] for pod in others], workers=[pod["worker"] for pod in found["pods"]])
        before = [pod["worker"]["address"] for pod in others]
        events = []
        for event in job.events(timeout=TWICE_AGAIN):
            say(event.name, **event.details)
            if event.name in ("host_lost", "host_back"):
                events.append(event.name)
            if event.name == "host_back" and event.details["address"] not in before:
                break
        found = status(job) if "host_back" in events else {"pods": []}
        starts = [pod["worker"]["starts"] for pod in found["pods"]]
        say("back", pods=len(found["pods"]), starts=starts, events=events)
        sys.stdin.readline()
        job.hosts.spawn_procs().initialized.get(BOUND)
    say("closed")


def injectable():
    """A pod's network is struck, and the weaver; a pod that may not delete itself stays."""
    from loom.threadlet import Threadlet

    class Struck(loom.Actor):
        @loom.endpoint
        async def train(self, name):
            self.threadlet = Threadlet(name)
            with self.threadlet.step(0):
                pass

    with a_job(injectable=True) as job:
        procs = job.hosts.spawn_procs(name="struck")
        actors = procs.spawn("struck", Struck)
        for host, name in enumerate(("first", "second")):
            actors.slice(hosts=host).train.call_one(name).get(BOUND)
        deadline = time.monotonic() + BOUND
        while len(replicas := job.weaver.replicas()) < 2:  # its threadlet has told the weaver soon after its step
            assert time.monotonic() < deadline
            time.sleep(0.1)
        told = {one: info.injectable for one, info in replicas.items()}
        say("marked", replicas=told)

        def struck(kind, replica, **params):
            injection = job.weaver.inject(kind, replica, **params)
            outcome = injection.get(BOUND)
            return {"evidence": dict(injection.evidence.get(replica, {})), "reason": outcome[replica].reason}

        say("cut", **struck("loss", "second", duration=1.0, params={"percent": 1}))
        say("pod", **struck("lost_host", "second"))
        try:
            job.weaver.inject("dead_weaver", "*")
        except loom.LoomError as error:
            say("refused", text=str(error))
    say("closed")


@contextlib.contextmanager
def warnings_said():
    class Said(logging.Handler):
        def emit(self, record):
            say("warning", text=record.getMessage())

    handler = Said(logging.WARNING)
    logging.getLogger("loom_proxy.kubernetes.rollout").addHandler(handler)
    yield
    logging.getLogger("loom_proxy.kubernetes.rollout").removeHandler(handler)


def refused(**options):
    try:
        with a_job(launch_timeout=30.0, **options):
            say("refused", error=None)
    except loom.LoomError as error:
        say("refused", error=type(error).__name__, text=str(error))


def no_namespace():
    kt.config.namespace = "nowhere"
    try:
        with loom.KubernetesJob(compute=kt.Compute(cpus=1, image=IMAGE, namespace="nowhere"), namespace="nowhere"):
            say("refused", error=None)
    except loom.LoomError as error:
        say("refused", error=type(error).__name__, text=str(error))


def no_image():
    try:
        image = kt.Image(image_id="registry.example/nothing:1")
        with loom.KubernetesJob(compute=kt.Compute(cpus=1, image=image)):
            say("refused", error=None)
    except loom.LoomError as error:
        say("refused", error=type(error).__name__, text=str(error))


def no_modules():
    """The pods' Python lacks modules, by what is in the folder that it is given."""
    compute = kt.Compute(cpus=1, image=IMAGE, env_vars={"PYTHONPATH": sys.argv[2]})
    try:
        with loom.KubernetesJob(compute=compute):
            say("refused", error=None)
    except loom.LoomError as error:
        say("refused", error=type(error).__name__, text=str(error))


def no_pods():
    try:
        loom.KubernetesJob(selector={"app": "nobody"}).apply()
    except loom.LoomError as error:
        say("refused", error=type(error).__name__, text=str(error))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
